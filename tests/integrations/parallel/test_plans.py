"""Plans by which torch splits a module: what they name, and what is refused beforehand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from bench.shared.models import Splittable, Tower
from gemini.parallel import plans
from gemini.parallel.plans import TensorParallel, split


def refused(model, said, plan=None, ranks=2, sequence=False):
    before = {name: id(param) for name, param in model.named_parameters()}
    mesh = SimpleNamespace(size=lambda: ranks)  # all that is asked before a module is changed
    with pytest.raises(ValueError, match=said):
        split(model, None, mesh, TensorParallel(plan, sequence))
    assert before == {name: id(param) for name, param in model.named_parameters()}


def planned(model, plan):
    model.tp_plan = plan
    return model


def test_words_of_transformers_are_styles_of_torch():
    model = Splittable()
    plan = {
        "blocks.*.q": "colwise",
        "blocks.1.out": "rowwise",
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
        "blocks.0.norm_1": "replicated_with_grad_allreduce",
        "blocks.0.up": ColwiseParallel(output_layouts=Shard(0)),
        "layers.*.expert": "colwise",  # of another model of its kind
    }
    found = plans.styles_of(planned(model, plan), None)
    kinds = {name: type(style) for name, style in found.items()}
    assert kinds == {
        "blocks.0.q": ColwiseParallel, "blocks.1.q": ColwiseParallel,
        "blocks.1.out": RowwiseParallel, "embed": RowwiseParallel, "head": ColwiseParallel,
        "blocks.0.norm_1": SequenceParallel, "blocks.0.up": ColwiseParallel,
    }  # fmt: skip
    assert found["embed"].input_layouts == found["head"].output_layouts == (Replicate(),)
    assert found["blocks.0.q"] is not found["blocks.1.q"]
    assert found["blocks.0.up"] is plan["blocks.0.up"]


def test_a_plan_that_is_none_or_another_modules_is_refused():
    refused(Tower(), "Tower has no plan by which layers are split; expected a model of transf")
    refused(planned(Tower(), {}), "has no plan")
    refused(Tower(), "'body', which is nothing that is there; expected", {"body": "colwise"})
    refused(planned(Tower(), {"body": "colwise"}), "names no module that it has; expected some of")
    refused(Splittable(), "which is the parameter head.weight", {"head.weight": "colwise"})
    refused(Splittable(), "splits head as 'moe_identity', for which", {"head": "moe_identity"})
    refused(Splittable(), "expected gate_up_proj and down_proj", {"head": "moe_tp_experts"})
    refused(Splittable(), "blocks.0.width is None; expected a", {"blocks.0": "divide width"})
    refused(Splittable(), "97 columns of 3 matrices, which 2 ranks", {"head": "qkv_colwise"})
    refused(Splittable(), "splits head as 3, for which torch has no style", {"head": 3})


def test_layers_and_heads_that_ranks_do_not_divide_are_refused():
    refused(Splittable(), "blocks.0.gate has out_features=72", {"blocks.*.gate": "colwise"}, 5)
    refused(Splittable(), "blocks.0.down has in_features=72", {"blocks.*.down": "rowwise"}, 5)
    model = Splittable()
    model.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 1})()
    refused(model, "heads=1, which tp_size=2 does not divide", {"head": "colwise_rep"})


def test_a_tied_weight_is_split_in_one_way():
    both = {"head": "rowwise", "embed": "embedding_rowwise"}
    refused(Splittable(tied=True), "embed.weight and head.weight are one parameter", both)
    for plan in ({"head": "colwise_gather_output"}, {"embed": "embedding_rowwise"}):
        model = Splittable(tied=True)
        styles = plans.styles_of(model, plan)
        plans.split_alike(model, styles, ["embed.weight", "head.weight"])
        assert type(styles["embed"]) is RowwiseParallel and type(styles["head"]) is ColwiseParallel


def test_a_module_that_shares_the_bias_of_a_split_layer_is_no_layer():
    """As BERT's head has it."""
    model = nn.ModuleDict({"head": nn.ModuleDict({"decoder": nn.Linear(4, 8)})})
    model["head"].register_parameter("bias", model["head"]["decoder"].bias)
    styles = plans.styles_of(model, {"head.decoder": "colwise_gather_output"})
    plans.split_alike(model, styles, ["head.bias", "head.decoder.bias"])
    assert list(styles) == ["head.decoder"]


def test_a_sequence_is_split_where_layers_are_norms_and_what_a_plan_splits():
    plan = {"blocks.*.q": "colwise"}
    refused(Splittable(), "0.k is a Linear that the plan does not split", plan, sequence=True)
    refused(
        Splittable(), "in 0 nn.ModuleLists; expected one", {"head": "colwise_rep"}, sequence=True
    )
    model = nn.ModuleDict({"a": Splittable(), "b": Splittable()})
    plan = {"*.blocks.*.q": "colwise"}
    refused(model, "in 2 nn.ModuleLists; expected one", plan, sequence=True)


def test_the_plan_of_a_user_names_what_is_there():
    model = Splittable()
    assert set(plans.styles_of(model, {"blocks.?.up": "colwise"})) == {"blocks.0.up", "blocks.1.up"}
    with pytest.raises(ValueError, match=r"blocks.up"):
        plans.styles_of(model, {"blocks.up": "colwise"})
    assert torch.is_grad_enabled()
