"""How a model is cut into stages: layers in order, under their names, each parameter once."""

import pytest
import torch
from torch import nn

from bench.shared.models import Tower
from gemini.parallel.cut import Cut, MissingLayer, shared_by, stages_of
from gemini.parallel.pipelined import MicrobatchSchedule


def test_layers_are_cut_evenly_or_as_given():
    assert Cut.of(8, 2).bounds == (0, 4, 8)
    assert Cut.of(7, 4).bounds == (0, 1, 3, 5, 7)
    assert Cut.of(5, 2, [4, 1]).bounds == (0, 4, 5)
    for given in ([4], [4, 2], [5, 0], [6, -1]):
        with pytest.raises(ValueError, match=r"num_layers_per_stage=.* for 5 layers in 2 stages"):
            Cut.of(5, 2, given)
    with pytest.raises(ValueError, match="1 layers in 2 stages; expected one layer or more"):
        Cut.of(1, 2)


def sequence():
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_sequence_keeps_its_names_and_its_parameters():
    model, x = sequence(), torch.randn(2, 3)
    stages = stages_of(model, 2)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert stages[1][0].weight is model[2].weight
    assert torch.equal(stages[1](stages[0](x)), model(x))
    twice = nn.Tanh()
    stages = stages_of(nn.Sequential(nn.Linear(3, 3), twice, nn.Linear(3, 3), twice), 2)
    assert [len(stage) for stage in stages] == [2, 2]
    last = stages_of(model, 2, [2, 3])[1]
    assert [name for name, _ in last.named_children()] == ["2", "3", "4"]


def test_a_weight_that_stages_tie_is_one_parameter_of_both():
    tied = sequence()
    tied.append(nn.Linear(4, 2))
    tied[5].weight = tied[4].weight
    assert shared_by(tied, stages_of(tied, 3, [2, 3, 1])) == [(("4.weight", "5.weight"), [1, 2])]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="a Tower cannot be cut into stages; expected nn"):
        stages_of(Tower(), 2)
    with pytest.raises(ValueError, match="stage 1 has no parameter; expected some in each"):
        stages_of(sequence(), 3, [1, 1, 3])


class Base(nn.Module):
    """As transformers' models are made."""

    def __init__(self, scale=1.0, extra=False):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(11, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = scale
        if extra:
            self.table = nn.Embedding(3, 4)

    @property
    def base_model(self):
        return self

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return type("Output", (), {"last_hidden_state": self.norm(x)})()


def test_a_model_that_does_more_than_its_layers_is_refused():
    with pytest.raises(ValueError, match="Base changes hidden states beside its layers"):
        stages_of(Base(scale=2.0), 2)
    with pytest.raises(ValueError, match="Base has parameters in table, beside its layers"):
        stages_of(Base(extra=True), 2)
    with torch.device("meta"):
        empty = Base()
    with pytest.raises(ValueError, match="Base is on the meta device; expected one with values"):
        stages_of(empty, 2)
    first, last = stages_of(Base(), 2)
    names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in Base().named_parameters())
    assert isinstance(first.norm, MissingLayer) and isinstance(last.embed_tokens, MissingLayer)
    first.register_forward_hook(print)
    assert not last._forward_hooks  # each stage has its own


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel", "Qwen3ForCausalLM"])
def test_a_model_of_transformers_is_its_stages_one_after_another(kind):
    transformers = pytest.importorskip("transformers")
    family = kind.removesuffix("ForCausalLM").removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = getattr(transformers, kind)(config)
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    stages = stages_of(model, 3)
    x = ids
    for stage in stages[:-1]:
        x = stage(x, attention_mask=mask)
    found = stages[-1].rebuilt(stages[-1](x, attention_mask=mask))
    want = model(ids, attention_mask=mask, use_cache=False)
    assert type(found) is type(want) and torch.equal(found[0], want[0])
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert len(list(model.parameters())) == len(names)  # the model itself is as it was


def test_rows_are_cut_into_micro_batches_of_one_size():
    assert MicrobatchSchedule("1f1b", 1, microbatches=4).count(8) == 4
    assert MicrobatchSchedule("1f1b", 1, rows=2).count(8) == 4
    for schedule in (
        MicrobatchSchedule("1f1b", 1, microbatches=3),
        MicrobatchSchedule("1f1b", 1, rows=3),
    ):
        with pytest.raises(ValueError, match=r"of 8 rows with .*=3; expected micro-batches"):
            schedule.count(8)


def test_places_have_the_stages_of_their_schedule():
    assert [MicrobatchSchedule("1f1b", 1).stages(i, 2) for i in (0, 1)] == [[0], [1]]
    assert [MicrobatchSchedule("interleaved", 3).stages(i, 2) for i in (0, 1)] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    assert [MicrobatchSchedule("zbv", 2).stages(i, 2) for i in (0, 1)] == [[0, 3], [1, 2]]
