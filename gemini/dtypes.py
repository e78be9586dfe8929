"""torch dtypes by the names that layouts use."""

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int16": torch.int16,  # of remainders of masters
}
