"""A few steps over small and odd sizes on the GPU, for compute-sanitizer; `cpu`: on the CPU."""

import sys

import torch

from optim import HybridAdam

device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
sizes = (1, 3, 17, 1023, 1025, 4099)
params = [torch.nn.Parameter(torch.randn(n, device=device)) for n in sizes]
optimizer = HybridAdam(params)
for _ in range(2):
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
if device.type == "cuda":
    torch.cuda.synchronize()
