"""Triton kernels of the optimizer step. Import Triton, and so this package, only where it is used.

launch.py    on which device, and in which interpreter
tiles.py     segment and tile tables; launch choice
rounding.py  loads and stores of all float types
frame.py     the update of every optimizer, and its prologue
adam.py, sgd.py, lion.py   two small functions each
norm.py      norm, overflow check, pack
ops.py       what the rest of the project calls: checked wrappers, registered with torch
"""

if __name__ == "kernels_triton":
    from gemini import names

    names.is_long(__name__)
