"""What works through each trainer, and which test shows it: the tables of docs/trainers.md.

`make readme-tables` writes them; a test compares, and looks for every test that is named.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that people do with a trainer."""

    what: str
    how: str  # in a few words: as it works here, or "refused: " and what to do
    test: str  # "FILE::NAME", FILE below tests/


OPTIMIZERS = (
    Row(
        "`torch.optim.AdamW`, `Adam`",
        "become `HybridAdam`: L2 and decoupled decay, `amsgrad`, `maximize`, groups, a rate that "
        "is a tensor",
        "integrations/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "`torch.optim.SGD`",
        "becomes `HybridSGD`: momentum, dampening, nesterov, `maximize`",
        "integrations/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "a `Lion`",
        "becomes `HybridLion`; options that change its formula are refused by name",
        "integrations/test_torch_optimizers.py::test_a_decoupled_lion_is_refused",
    ),
    Row(
        "state that it has",
        "is taken over",
        "integrations/test_torch_optimizers.py::test_state_that_it_has_goes_on",
    ),
    Row(
        "another optimizer, a subclass, a replaced `step`",
        "refused, with what is taken",
        "integrations/test_torch_optimizers.py::test_what_has_no_meaning_here_is_refused_and_nothing_changes",
    ),
)

LIGHTNING = (
    Row(
        "`Trainer(strategy=GeminiStrategy(...))`",
        "losses, norms, rates, evaluation and weights are those of Lightning's DDP at 1, 2 and 4 "
        "ranks; with accumulation, clipping by norm and by value, state on NVMe",
        "integrations/test_lightning_ranks.py::test_losses_norms_rates_and_evaluation_are_those_of_ddp",
    ),
    Row(
        '`"gemini"`, `"gemini_nvme"`, `"zero1"`, `"zero2"`',
        "registered with Trainer and Fabric by importing `gemini.integrations.lightning`",
        "integrations/test_lightning_names.py::test_registered_names_place_what_they_say",
    ),
    Row(
        "`Trainer(precision=)`",
        '`"32-true"`, `"bf16-mixed"` and `"bf16-true"` (one thing here: masters are fp32), '
        '`"16-mixed"`; targets keep their bits',
        "integrations/test_lightning.py::test_modules_compute_in_the_precision_and_targets_keep_their_bits",
    ),
    Row(
        '`precision=` `"16-true"`, `"64-true"`, plugins that cast or scale',
        "refused, with what is taken",
        "integrations/test_lightning.py::test_what_cannot_be_done_is_refused_when_it_is_asked",
    ),
    Row(
        "`accumulate_grad_batches`",
        "each chunk is reduced once; a schedule of it works",
        "integrations/test_lightning_ranks.py::test_an_accumulation_reduces_each_chunk_once",
    ),
    Row(
        "`validate`, `test`, `predict`",
        "also before a fit, without optimizer state",
        "integrations/test_lightning_ranks.py::test_validation_test_and_prediction_need_no_fit",
    ),
    Row(
        "`ModelCheckpoint`, `ckpt_path=`",
        "folders that ranks stream to, with Lightning's own state in them; resume also within an "
        "accumulation and at another number of ranks",
        "integrations/test_lightning_ranks.py::test_a_fit_goes_on_at_another_world_size",
    ),
    Row(
        '`GeminiStrategy(checkpoint="full")`',
        "one file that a plain Trainer goes on from; a plain Trainer's file is taken too",
        "integrations/test_lightning_ranks.py::test_a_file_of_either_strategy_goes_on_with_the_other",
    ),
    Row(
        "memory of a save",
        "a chunk, on every rank",
        "integrations/test_lightning_memory.py::test_a_save_at_two_ranks_takes_a_chunk_and_no_more",
    ),
    Row(
        "`trainer.save_checkpoint` after `fit`",
        "with `weights_only=True`; the optimizer's state ends with the fit",
        "integrations/test_lightning_checkpoints.py::test_weights_alone_are_saved_and_cannot_be_gone_on_from",
    ),
    Row(
        "`configure_model`, `configure_sharded_model`, `init_module(empty_init=True)`",
        "with `GeminiStrategy(empty_init=True)` no rank ever holds the model",
        "integrations/test_lightning_loops.py::test_a_model_that_is_made_late_may_have_no_memory_until_it_is_wrapped",
    ),
    Row(
        "the module after a fit",
        "a plain one on the CPU with fp32 values; no file is left",
        "integrations/test_lightning_loops.py::test_a_fit_leaves_a_plain_module_and_no_files",
    ),
    Row(
        "manual optimization, finetuning callbacks, `LearningRateFinder`",
        "as with DDP; manual optimization not in fp16, and at several ranks not with gradients "
        "read inside the step",
        "integrations/test_lightning_loops.py::test_other_loops_are_those_of_ddp",
    ),
    Row(
        "`StochasticWeightAveraging`, `EMAWeightAveraging`",
        "in fp32; refused in 16 bits, where they would round the masters",
        "integrations/test_lightning_ranks.py::test_weight_averages_are_those_of_ddp",
    ),
    Row(
        "`BatchSizeFinder`",
        "refused by Lightning, as for every strategy of several processes",
        "integrations/test_lightning_loops.py::test_the_batch_size_finder_is_refused_by_name",
    ),
    Row(
        "several optimizers, `sync_batchnorm=True`, `max_norm=` beside `gradient_clip_val=`",
        "refused by name",
        "integrations/test_lightning.py::test_what_a_fit_cannot_do_is_refused_before_a_step",
    ),
    Row(
        "popen, torchrun, fork",
        "as with DDP: `start_method=`",
        "integrations/test_lightning_launchers.py::test_ranks_that_popen_torchrun_and_fork_start_train_alike",
    ),
    Row(
        "`Fabric(strategy=GeminiFabricStrategy(...))`",
        "`setup`, `backward`, `clip_gradients`, `no_backward_sync`, `save`, `load`",
        "integrations/test_lightning_fabric.py::test_losses_norms_and_rates_are_those_of_ddp",
    ),
    Row(
        "`ColossalAIStrategy(...)`",
        "its 21 parameters and its methods, on this; fp16 unless asked otherwise",
        "integrations/test_lightning_names.py::test_colossal_ais_methods_do_what_they_did",
    ),
)

SUPPORTED: dict[str, tuple[Row, ...]] = {
    "optimizers": OPTIMIZERS,
    "lightning": LIGHTNING,
}


def table(library: str) -> str:
    """A markdown table of the library's rows."""
    rows = [f"| {row.what} | {row.how} |" for row in SUPPORTED[library]]
    return "\n".join(["| what | here |", "|---|---|", *rows])
