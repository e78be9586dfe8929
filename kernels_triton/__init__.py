"""Triton kernels of the optimizer step. Import Triton, and so this package, only where it is used.

launch.py    device, interpreter and tile size of a launch
tiles.py     segment and tile tables, and the control vector
rounding.py  loads and stores of all float types, and of split masters
update/      the update of every optimizer, and its prologue (`frame.py`); two small functions each
norm.py      norm, overflow check, pack
rows.py      norms of rows and cross-entropy, for modules (`gemini.fused`)
symmetric.py a matrix times its transpose, for Muon
lines.py     squares along rows and columns, for Adafactor
float8.py    parameters as float8 and back, for gathers (`gemini.chunk.float8`)
ops.py       checked wrappers, registered with torch, that the rest of the project calls
"""

if __name__ == "kernels_triton":
    from gemini import names

    names.is_long(__name__)
