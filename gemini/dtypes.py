"""Dtypes of torch by their names in layouts."""

import torch

BYTES = "uint8"  # of opaque parameters
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    BYTES: torch.uint8,
    "int16": torch.int16,  # of remainders of masters
    "int8": torch.int8,  # of quantised state
}
