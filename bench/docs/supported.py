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
        "integrations/trainers/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "`torch.optim.SGD`",
        "becomes `HybridSGD`: momentum, dampening, nesterov, `maximize`",
        "integrations/trainers/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "`torch.optim.Adagrad`, `RMSprop`, `Adamax`, `NAdam`, `RAdam`, `Adadelta`",
        "become `HybridAdagrad` and so on, with all options of their formulas",
        "integrations/trainers/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "a `Lion`",
        "becomes `HybridLion`; options that change its formula are refused by name",
        "integrations/trainers/test_torch_optimizers.py::test_a_decoupled_lion_is_refused",
    ),
    Row(
        "`AdamW8bit`, `PagedAdamW8bit` and the like of bitsandbytes, `AdamW8bit` of torchao",
        'become `HybridAdam(state="8bit")` before their first step; 32-bit ones `HybridAdam`',
        "integrations/trainers/test_torch_optimizers.py"
        "::test_adamw_of_other_packages_keeps_its_state_in_as_few_bits",
    ),
    Row(
        "`torch.optim.Adafactor`",
        "becomes `HybridAdafactor`",
        "integrations/trainers/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "`torch.optim.Muon`",
        "becomes `HybridMuon` over its matrices; `HybridMuon(model)` updates a whole model",
        "integrations/trainers/test_torch_optimizers.py"
        "::test_a_muon_goes_on_with_its_matrices_alone",
    ),
    Row(
        "state of a converted optimizer",
        "is carried over",
        "integrations/trainers/test_torch_optimizers.py::test_state_that_it_has_goes_on",
    ),
    Row(
        "another optimizer, a subclass, a replaced `step`",
        "refused; the error lists what is supported",
        "integrations/trainers/test_torch_optimizers.py"
        "::test_what_has_no_meaning_here_is_refused_and_nothing_changes",
    ),
)

_ACCELERATE = "integrations/trainers/test_accelerate.py::test_"
_TRAINER = "integrations/trainers/test_trainer.py::test_"
_PRETRAINED = "integrations/trainers/test_pretrained.py::test_"
_WINDOWS = "gemini/accumulation/test_windows.py::test_"
_RANKS = "dist/test_trainers.py::test_"
_SCRIPTS = "borrowed/test_accelerate_scripts.py::test_"

ACCELERATE = (
    Row(
        "`prepare`, in any order",
        "models become `GeminiDDP`, torch's optimizers become this project's; no state is copied",
        f"{_ACCELERATE}any_order_of_prepare",
    ),
    Row(
        "`accumulate`, `no_sync`, `clip_grad_norm_`, `clip_grad_value_`, `gather_for_metrics`",
        "as under DDP, at 1, 2 and 4 ranks: losses, norms, rates and evaluation to 1e-5",
        f"{_RANKS}accelerates_loop_is_ddps_and_its_state_goes_on",
    ),
    Row(
        "`gemini.accumulate` with the prepared model",
        "micro-batches layer by layer; `accelerator.accumulate` asks for each loss before the next "
        "batch is there, so its order is one after the other",
        f"{_WINDOWS}a_loop_of_accelerate_gives_its_model_to_accumulate",
    ),
    Row(
        "`mixed_precision`",
        '`"bf16"` and `"fp16"` with fp32 masters and a loss scale; without one, the dtype of the '
        "parameters. fp8 is refused",
        f"{_ACCELERATE}16_bits_stay_near_fp32",
    ),
    Row(
        "`optimizer_step_was_skipped`",
        "after an overflow the schedule does not advance",
        f"{_ACCELERATE}an_overflow_moves_no_schedule",
    ),
    Row(
        "`save_state`, `load_state`, hooks, registered objects, `automatic_checkpoint_naming`",
        "a sharded checkpoint beside accelerate's small files; loads at any world size",
        f"{_ACCELERATE}a_state_that_is_loaded_goes_on_with_the_same_bits",
    ),
    Row(
        "`unwrap_model`, `get_state_dict`, `save_model`",
        "the inner module, which stays wrapped; fp32 weights on rank 0; safetensors, written a "
        "chunk at a time",
        f"{_ACCELERATE}the_unwrapped_model_is_the_inner_one_and_saves_fp32",
    ),
    Row(
        "`GradScalerKwargs`, `DistributedDataParallelKwargs(broadcast_buffers=)`",
        "supported; a `comm_hook` is refused",
        f"{_ACCELERATE}a_loss_scale_of_accelerates_is_taken",
    ),
    Row(
        "`dynamo_backend`, `torch_compile`",
        "the inner module is compiled, in place; regional compilation is refused",
        f"{_ACCELERATE}a_compiled_model_trains_as_an_eager_one",
    ),
    Row(
        "DeepSpeed, FSDP, Megatron and tensor-parallel plugins",
        "refused: `GeminiDDP` shards the model itself",
        f"{_ACCELERATE}what_has_no_meaning_here_is_refused_by_name",
    ),
    Row(
        "`join_uneven_inputs` with uneven batches",
        "refused: a rank without a batch takes no part in gathers",
        f"{_SCRIPTS}accelerates_checks_pass_or_are_refused",
    ),
    Row(
        "a process group of several ranks that accelerate does not know of",
        "refused: each rank would train on all data; on CPUs give `cpu=True`",
        f"{_RANKS}ranks_that_accelerate_does_not_know_of_are_refused",
    ),
    Row(
        "`log_with=`",
        "`accelerator.log(gemini.Metrics(model, optimizer).as_dict())`: bytes, seconds, peaks",
        f"{_ACCELERATE}trackers_are_given_what_steps_moved",
    ),
)

TRANSFORMERS = (
    Row(
        "accumulation, clipping, schedules, evaluation",
        "as plain Trainer, at 1, 2 and 4 ranks: losses, norms, rates and evaluation to 1e-5",
        f"{_RANKS}trainers_losses_norms_rates_and_evaluation_are_ddps",
    ),
    Row(
        '`accumulate_order="layers"`',
        'micro-batches layer by layer, with the bits of `"batches"`; a model that is no chain of '
        "layers, or a step that calls it twice (DPO), is refused by name",
        f"{_WINDOWS}both_orders_of_trainer_have_the_same_bits",
    ),
    Row(
        "state on NVMe, activation checkpointing, `eval_on_start`",
        "as plain Trainer",
        f"{_TRAINER}losses_norms_rates_and_evaluation_are_plain_trainers",
    ),
    Row(
        "`args.optim`",
        "`adamw_torch`, `adamw_torch_fused`, `sgd`, `adagrad`, `rmsprop`, `lion_32bit`, "
        "`adafactor` (with transformers' numbers), "
        "`schedule_free_adamw` (with its `optim_args`), `paged_adamw_32bit`; `adamw_8bit`, "
        '`adamw_bnb_8bit`, `adamw_torch_8bit`, `paged_adamw_8bit` are `HybridAdam(state="8bit")`, '
        "which has its own 8-bit codes; any other is refused by name",
        f"{_TRAINER}what_has_no_meaning_here_is_refused_by_name",
    ),
    Row(
        "`bf16`, `fp16`, `gemini=dict(precision=)`",
        "with fp32 masters; without either, the dtype of the parameters",
        f"{_TRAINER}the_precision_is_the_arguments_own",
    ),
    Row(
        "saving, resuming, `save_total_limit`, `save_only_model`",
        "a resumed run has the same bits, also at another world size; `from_pretrained` loads the "
        "weights",
        f"{_RANKS}trainer_saves_resumes_and_says_what_plain_trainer_cannot",
    ),
    Row(
        "a plain Trainer's checkpoint",
        "resumes",
        f"{_TRAINER}a_plain_trainers_checkpoint_resumes",
    ),
    Row(
        "`load_best_model_at_end`",
        "loads fp32 masters, a tensor at a time",
        f"{_TRAINER}the_best_model_comes_back",
    ),
    Row(
        "`auto_find_batch_size`",
        "the model stays wrapped",
        f"{_TRAINER}a_batch_that_does_not_fit_is_made_smaller",
    ),
    Row(
        "`evaluate`, `predict` before training, `train` twice",
        "as plain Trainer",
        f"{_TRAINER}evaluation_and_prediction_need_no_training",
    ),
    Row(
        "LoRA by peft",
        "trains, resumes, is reloaded as the best model; only the adapter is saved",
        f"{_PRETRAINED}lora_trains_saves_and_resumes_as_in_plain_trainer",
    ),
    Row(
        "trainers of trl",
        "`class T(GeminiTrainerMixin, SFTTrainer)`",
        f"{_PRETRAINED}a_trainer_of_trl_takes_the_mixin",
    ),
    Row(
        "`SFTTrainer`, `DPOTrainer`, `RewardTrainer`, `GRPOTrainer`",
        "losses and norms of trl over DDP at 1 and 2 ranks, to 1e-5; with adapters, the reference "
        "model of DPO and GRPO is the base, not a second copy",
        f"{_RANKS}methods_of_trl_train_as_over_ddp",
    ),
    Row(
        "`report_to=`",
        "`MetricsCallback(trainer)` adds bytes moved, seconds, peaks to what the trainer logs",
        f"{_TRAINER}metrics_go_where_the_trainer_logs",
    ),
    Row(
        "plain `Trainer(GeminiDDP(model), ...)`",
        "trains at one rank; at several it is refused, and the error names `GeminiTrainer`",
        f"{_RANKS}trainer_saves_resumes_and_says_what_plain_trainer_cannot",
    ),
    Row(
        "`deepspeed`, `fsdp`, `save_on_each_node`, `fp16_full_eval`, `bf16_full_eval`",
        "refused by name",
        f"{_TRAINER}what_has_no_meaning_here_is_refused_by_name",
    ),
)

LIGHTNING = (
    Row(
        "`Trainer(strategy=GeminiStrategy(...))`",
        "losses, norms, rates, evaluation and weights are those of Lightning's DDP at 1, 2 and 4 "
        "ranks; with accumulation, clipping by norm and by value, state on NVMe",
        "integrations/lightning/test_lightning_ranks.py::test_losses_norms_rates_and_evaluation_are_those_of_ddp",
    ),
    Row(
        '`"gemini"`, `"gemini_nvme"`, `"zero1"`, `"zero2"`',
        "registered with Trainer and Fabric by importing `gemini.integrations.lightning`",
        "integrations/lightning/test_lightning_names.py::test_registered_names_place_what_they_say",
    ),
    Row(
        "a LightningCLI config",
        "names the class, which needs no import",
        "integrations/lightning/test_lightning_names.py"
        "::test_a_config_of_lightning_cli_names_the_strategy",
    ),
    Row(
        '`GeminiStrategy("zero1", overlap_allgather=True, communication_dtype="bf16")`, `"zero2"`',
        "new weights are gathered during the next forward; gradients are sent in another dtype",
        "integrations/lightning/test_lightning_ranks.py"
        "::test_weights_are_on_their_way_behind_a_step_where_that_is_asked_for",
    ),
    Row(
        "`Trainer(precision=)`",
        '`"32-true"`, `"bf16-mixed"` and `"bf16-true"` (equal here: masters are fp32), '
        '`"16-mixed"`; targets keep their bits',
        "integrations/lightning/test_lightning.py::test_modules_compute_in_the_precision_and_targets_keep_their_bits",
    ),
    Row(
        '`precision=` `"16-true"`, `"64-true"`, plugins that cast or scale',
        "refused; the error lists what is supported",
        "integrations/lightning/test_lightning.py::test_what_cannot_be_done_is_refused_when_it_is_asked",
    ),
    Row(
        "`accumulate_grad_batches`",
        "each chunk is reduced once; a schedule of it works. Micro-batches run one after the other "
        "alone: Lightning asks for each loss before the next batch is there",
        "integrations/lightning/test_lightning_ranks.py::test_an_accumulation_reduces_each_chunk_once",
    ),
    Row(
        "`validate`, `test`, `predict`",
        "also before a fit, without optimizer state",
        "integrations/lightning/test_lightning_ranks.py::test_validation_test_and_prediction_need_no_fit",
    ),
    Row(
        "`ModelCheckpoint`, `ckpt_path=`",
        "folders that all ranks write, including Lightning's own state; a run also resumes within "
        "an accumulation and at another number of ranks",
        "integrations/lightning/test_lightning_ranks.py::test_a_fit_goes_on_at_another_world_size",
    ),
    Row(
        '`GeminiStrategy(checkpoint="full")`',
        "one file that a plain Trainer resumes from; a plain Trainer's file loads too",
        "integrations/lightning/test_lightning_ranks.py::test_a_file_of_either_strategy_goes_on_with_the_other",
    ),
    Row(
        "memory of a save",
        "one chunk on every rank",
        "deep/clock/test_lightning_memory.py::test_a_save_at_two_ranks_takes_a_chunk_and_no_more",
    ),
    Row(
        "`trainer.save_checkpoint` after `fit`",
        "with `weights_only=True`; the end of the fit discards the optimizer's state",
        "integrations/lightning/test_lightning_checkpoints.py::test_weights_alone_are_saved_and_cannot_be_gone_on_from",
    ),
    Row(
        "`configure_model`, `configure_sharded_model`, `init_module(empty_init=True)`",
        "with `GeminiStrategy(empty_init=True)` no rank ever holds the model",
        "integrations/lightning/test_lightning_loops.py::test_a_model_that_is_made_late_may_have_no_memory_until_it_is_wrapped",
    ),
    Row(
        "loggers, `LearningRateMonitor`",
        "`GeminiMetrics()` logs bytes moved, seconds, peaks; `lr-AdamW` keeps its name",
        "integrations/lightning/test_lightning_loops.py"
        "::test_loggers_have_metrics_and_rates_by_the_name_that_they_had",
    ),
    Row(
        "the module after a fit",
        "a plain module on the CPU, with fp32 values; all files are removed",
        "integrations/lightning/test_lightning_loops.py::test_a_fit_leaves_a_plain_module_and_no_files",
    ),
    Row(
        "a model that is larger than the memory of a rank",
        "`GeminiStrategy(unwrap_at_end=False)` leaves it wrapped, also for the next run; without "
        "it, the end of the fit is an error that names this option",
        "integrations/lightning/test_lightning_loops.py"
        "::test_a_module_that_stays_wrapped_is_fitted_tested_and_fitted_again",
    ),
    Row(
        "manual optimization, finetuning callbacks, `LearningRateFinder`",
        "as with DDP; no manual optimization in fp16, or at several ranks if gradients are read "
        "inside the step",
        "integrations/lightning/test_lightning_loops.py::test_other_loops_are_those_of_ddp",
    ),
    Row(
        "`StochasticWeightAveraging`, `EMAWeightAveraging`",
        "in fp32; refused in 16 bits, because they would round the masters",
        "integrations/lightning/test_lightning_ranks.py::test_weight_averages_are_those_of_ddp",
    ),
    Row(
        "`BatchSizeFinder`",
        "refused by Lightning, as for every strategy of several processes",
        "integrations/lightning/test_lightning_loops.py::test_the_batch_size_finder_is_refused_by_name",
    ),
    Row(
        "several optimizers, `sync_batchnorm=True`, `max_norm=` beside `gradient_clip_val=`",
        "refused by name",
        "integrations/lightning/test_lightning.py::test_what_a_fit_cannot_do_is_refused_before_a_step",
    ),
    Row(
        "popen, torchrun, fork",
        "as with DDP: `start_method=`",
        "integrations/lightning/test_lightning_launchers.py::test_ranks_that_popen_torchrun_and_fork_start_train_alike",
    ),
    Row(
        "`Fabric(strategy=GeminiFabricStrategy(...))`",
        "`setup`, `backward`, `clip_gradients`, `no_backward_sync`, `save`, `load`",
        "integrations/lightning/test_lightning_fabric.py::test_losses_norms_and_rates_are_those_of_ddp",
    ),
    Row(
        "`ColossalAIStrategy(...)`",
        "its 21 parameters and its methods; fp16 by default",
        "integrations/lightning/test_lightning_names.py::test_colossal_ais_methods_do_what_they_did",
    ),
)

_SAMPLERS = "integrations/samplers/test_samplers.py::test_"
_DELTAS = "gemini/transfer/test_deltas.py::test_"
SAMPLERS = (
    Row(
        "`model.weights(since=version, deltas=True)`",
        "of a changed parameter its changed elements, with 1 byte of position each; "
        "`bucket.apply(weights)` puts them in place. Updates mark them from the first such call "
        "on, 1/8 byte a trained parameter; one receiver",
        f"{_DELTAS}a_receiver_has_the_senders_digest_over_20_steps",
    ),
    Row(
        "`merged.merged_weights(model, since=)`",
        "plain LoRA of peft added to each base weight in its bucket, by the names of the model "
        "without adapters; the model stays as it is",
        f"{_SAMPLERS}adapters_are_merged_bucket_by_bucket_under_plain_names",
    ),
    Row(
        "`send_through(trainer.vllm_generation, model)`",
        "`sync_weights` of trl 1.16 takes buckets, `server` and `colocate`; names and shapes "
        "gather nothing",
        f"{_SAMPLERS}trls_own_loop_takes_buckets_in_both_modes",
    ),
    Row(
        "`merged.named_weights(model)`, `tensor_specs(model)`",
        "what `send_weights` of a checkpoint engine of verl 0.9.1 and `load_weights` of vLLM take, "
        "and what vLLM's `update_weights` is told before; each against a stub",
        f"{_SAMPLERS}verls_checkpoint_engine_takes_the_stream",
    ),
    Row(
        "`files.WeightFiles(folder, model).send()`, `read_weights(folder, weights, since)`",
        "versions in safetensors, written whole or not at all, for a process without the model",
        f"{_SAMPLERS}an_evaluation_process_follows_versions_in_a_folder",
    ),
    Row(
        "`load_bucket(other, bucket)`",
        "a wrapped module of any world size is the receiver; whole parameters",
        f"{_SAMPLERS}another_wrapped_module_of_any_world_size_is_a_receiver",
    ),
)
SUPPORTED: dict[str, tuple[Row, ...]] = {
    "samplers": SAMPLERS,
    "accelerate": ACCELERATE,
    "transformers": TRANSFORMERS,
    "optimizers": OPTIMIZERS,
    "lightning": LIGHTNING,
}


def table(library: str) -> str:
    """A markdown table of the library's rows."""
    rows = [f"| {row.what} | {row.how} |" for row in SUPPORTED[library]]
    return "\n".join(["| what | here |", "|---|---|", *rows])
