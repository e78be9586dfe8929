"""What training on meshes is compared with one process by: its optimizer, ZeRO stages, steps."""

from gemini import StaticPlacement

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}  # eps: small gradients are no signs
STAGES = {
    1: StaticPlacement(0.0, shard_grads=False),
    2: StaticPlacement(0.0),
    3: StaticPlacement(1.0),
}
STEPS, PARTS = 3, 3  # parts: backwards that add up to a step
