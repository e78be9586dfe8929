"""docs/glossary.md: its words are the code's, each has one row, and old ones do not come back."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
SOURCE = ("gemini", "optim", "io/nvme", "kernels_triton")
FEWEST_WORDS = 4  # of a sentence that says what a class is

# What identifiers of the source were called, and are called now
RETIRED = {
    "Tiers": "PlanInputs",
    "PlacementProblem": "PlanInputs",
    "_tiers": "_tiered_state",
    "Planned": "PlanResult, StepsFor",
    "Numerics": "PrecisionSettings",
    "numerics": "precision_settings",
    "Adoption": "UserWrites",
    "adoption": "user_writes",
    "adopt": "write_back",
    "adopt_changes": "write_back_changes",
    "Settling": "MovingHomes",
    "Promotion": "MovingHomes",
    "raise_homes": "promote_homes",
    "raise_state": "promote_state",
    "lower_homes": "demote_homes",
    "lower_state": "demote_state",
    "Integrity": "ModuleCheck",
    "integrity": "module_check",
    "Ledger": "MemoryLedger",
    "_Ledger": "_ProfileBuilder",
    "Scaler": "ControlVector",
    "scaler": "control_vector",
    "Elsewhere": "GradientOffload",
    "elsewhere": "offload",
    "dtype_elsewhere": "offloaded_dtype",
    "ParamOwner": "EngineHandle",
    "StepPath": "an executor",
    "CpuStepPath": "an executor",
    "TritonStepPath": "an executor",
    "CpuPath": "an executor",
    "TritonPath": "an executor",
    "Look": "StateVisitor, RunVisitor",
    "Source": "StateSource, CheckpointSource",
    "Put": "RunFiller",
    "Fill": "RunWalk, _TensorFill",
    "_Filling": "_ChunkBuilder, _BoxReader, _OpenUnit",
    "Together": "TicketGroup, PipelineOwner",
    "ShardPart": "ShardSegment",
    "BlockPart": "BlockSegment",
    "shard_parts": "shard_segments",
    "kept": "never_released, cached",
    "kept_scale": "carried_scale",
    "kept_modules": "find_fp32_modules",
    "is_whole": "is_unsharded, has_own_bytes",
    "whole_grads": "unsharded_grads",
    "whole_state": "full_state",
    "whole_of": "full_tensor_of",
    "check_whole": "check_complete",
    "thaw": "unfreeze",
    "rise": "promote",
    "sink": "demote",
    "wholes": "whole_params",
    "Whole": "WholeParam",
    "Ways": "Transport",
    "Cover": "ParamAndGrad",
    "free_staging": "release_staging",
    "shown_as": "logical_layout",
    "shown_state": "state_views",
    "follow_all": "replan_together",
    "lent": "swapped, bound_to",
}
PLAIN_ENGLISH = {"kept", "elsewhere"}  # as locals they may be what they say
OTHERS_WORDS = {("gemini/integrations", "scaler")}  # torch's GradScaler


def rows(text):
    """(words, meaning) of every row of the table."""
    found = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [
        ([word.strip(" `") for word in words.split(",")], meaning)
        for words, meaning in found
        if words not in ("word", "---")
    ]


def words_of(text):
    """In lower case, names taken apart: `ShardPlan.param_home` is "shard plan.param home"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", text).lower()


@cache
def source():
    """Path from the root -> text, of all modules."""
    paths = [path for folder in SOURCE for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 150
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def trees():
    return {path: ast.parse(text) for path, text in source().items()}


def identifiers(tree):
    """(name, line) of all that is named or used; plain English only where others see it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in PLAIN_ENGLISH:
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg is not None:
            yield node.arg, getattr(node, "lineno", 0)
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2], node.lineno


def public_classes():
    """(path, class) of every class of a module that others may name."""
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield path, node


def unused(words, texts):
    """Words that no name, docstring or comment has, in any ending."""
    text = "\n".join(map(words_of, texts))
    return [word for word in words if not re.search(rf"\b{re.escape(words_of(word))}", text)]


def says_what_it_is(node):
    """Whether the first sentence of a class's docstring defines it."""
    first = re.split(r"(?<=[.!?])\s|\n\n", ast.get_docstring(node) or "", maxsplit=1)[0]
    return len(first.split()) >= FEWEST_WORDS and not first.startswith("See ")


def test_a_word_that_no_code_uses_is_found():
    assert unused(["state space", "shard", "zarf"], ["class StateSpace: # of shards"]) == ["zarf"]


def test_every_word_is_used_in_the_code():
    found = rows(GLOSSARY.read_text(encoding="utf-8"))
    assert len(found) > 60
    helpers = [path.read_text(encoding="utf-8") for path in (ROOT / "tests/support").rglob("*.py")]
    words = [word for several, _ in found for word in several]
    assert unused(words, [*source().values(), *helpers]) == []


def test_no_word_has_two_rows():
    counts = Counter(
        word.lower() for words, _ in rows(GLOSSARY.read_text(encoding="utf-8")) for word in words
    )
    assert [word for word, count in counts.items() if count > 1] == []


def test_every_name_that_the_glossary_shows_exists():
    shown = re.findall(r"`([A-Z]\w*[a-z]\w*)`", GLOSSARY.read_text(encoding="utf-8"))
    known = {name for tree in trees().values() for name, _ in identifiers(tree)}
    assert len(shown) > 10 and [name for name in shown if name not in known] == []


def test_every_public_class_is_in_the_glossary_or_says_what_it_is():
    known = {
        words_of(word) for words, _ in rows(GLOSSARY.read_text(encoding="utf-8")) for word in words
    }
    assert [
        f"{path}: {node.name}"
        for path, node in public_classes()
        if not path.startswith("kernels_triton")
        and words_of(node.name) not in known
        and not says_what_it_is(node)
    ] == []


def test_a_retired_word_is_found_wherever_others_see_it():
    text = "def f(kept, x):\n    elsewhere = x.adopt(scaler=1)\n    class Tiers: ...\n"
    found = {name for name, _ in identifiers(ast.parse(text)) if name in RETIRED}
    assert found == {"kept", "adopt", "scaler", "Tiers"}


def test_retired_words_are_no_identifiers():
    back = [
        f"{path}:{line}: {name}; it is {RETIRED[name]}"
        for path, tree in trees().items()
        for name, line in identifiers(tree)
        if name in RETIRED
        and not any(path.startswith(folder) and name == word for folder, word in OTHERS_WORDS)
    ]
    assert back == []
