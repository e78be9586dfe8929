"""A few steps over small and odd sizes on the GPU, for compute-sanitizer."""

import torch

from optim import HybridAdam

params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in (1, 3, 17, 1023, 1025, 4099)]
optimizer = HybridAdam(params)
for _ in range(2):
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
torch.cuda.synchronize()
