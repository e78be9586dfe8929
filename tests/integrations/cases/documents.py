"""Code blocks of Colossal-AI's documents, as classic/blocks.toml has them."""

import tomllib
from pathlib import Path

FILE = Path(__file__).parents[1] / "classic/blocks.toml"


def _expanded(block):
    """The block, and the others that are the same script with something changed."""
    others = block.pop("also", ())
    yield block
    for other in others:
        code = block["code"]
        for here, there in other["changed"].items():
            assert here in code, here
            code = code.replace(here, there)
        yield {**block, **other, "code": code}


def read():
    """Blocks that are run or have no door; and pages by the test that runs what they show."""
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return [one for block in found["block"] for one in _expanded(block)], found["tested"]
