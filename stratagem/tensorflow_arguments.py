"""Arguments that Keras and TensorFlow have and nothing here does: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Foreign = Mapping[str, tuple[str, tuple[Any, ...]]]
"""By the argument's name: the way out, and the values that ask for what is done anyway."""

_NONE = (None,)
DATA = "DataLoader(..., num_workers=, prefetch_factor=) says how data is read"
_DRAWN = "a callback of your own writes it, in on_epoch_end, with torch.utils.tensorboard.SummaryWriter"
HOOK = "what a hook would do, model_fn does in each step, and a function of saving_listeners= at each checkpoint"
_PROCESSES = "train_distribute= says on which devices, `stratagem run` in which processes"
_PROGRAM = "example_inputs= says what the exported program is called with"
_FITTING = "module.load_state_dict(state, strict=False) before compile takes what fits"
_HOOKS: Foreign = {"hooks": (HOOK, (None, [], ()))}
_OVERWRITE: Foreign = {"overwrite": ("what is there is replaced", (True,))}
_OPTIONS: Foreign = {"options": ("leave it out", _NONE)}
_FORMAT = "save() has one format, a folder that sg.load_model reads"
_ASSIGNED: Foreign = {
    "use_locking": ("leave it out", (False, None)),
    "read_value": ("leave it out", (True,)),
    "name": ("leave it out", _NONE),
}
_RESOLVER: Foreign = {
    "rpc_layer": ("it is gRPC", ("grpc", None)),
    **dict.fromkeys(("master", "environment"), ("leave it out", ("", None))),
    "num_accelerators": ("the strategy has devices=", ({}, None)),
    **dict.fromkeys(("gpus_per_node", "gpus_per_task", "tasks_per_node"), ("Slurm says it to each task", _NONE)),
    "auto_set_gpu": ("srun --gpus-per-task gives each task its own", (False,)),
    **dict.fromkeys(("job_to_label_mapping", "override_client"), ("TF_CONFIG says the cluster", _NONE)),
}
_OF_DATA: Foreign = {
    "workers": (DATA, (0, 1, None)),
    "use_multiprocessing": (DATA, (False, None)),
    "max_queue_size": (DATA, (10, None)),
    "nb_epoch": ("its name is epochs", ()),
    "predict_keys": ("give EstimatorSpec(predictions=) those alone", _NONE),
    "yield_single_examples": ("predictions are of single examples, and torch.stack joins them", (True,)),
    **_HOOKS,
}
_EXPORTER: Foreign = {
    "serving_input_receiver_fn": (_PROGRAM, _NONE),
    "assets_extra": ("metadata= of Estimator.export_model goes with a program", _NONE),
    "as_text": (_PROGRAM, (False,)),
    "event_file_pattern": ("best.json beside the exports remembers the best", _NONE),
}

INSTEAD: Mapping[str, Foreign] = {
    "compile": {
        "loss_weights": ("give loss=f, where f(outputs, targets) adds up the losses times their weights", _NONE),
        "weighted_metrics": (
            "metrics count each example once: in a loop of your own update one of torchmetrics with weights",
            (None, []),
        ),
        "jit_compile": ("torch_compile=True compiles the module", (False, "auto", None)),
        "run_eagerly": ("every step is, unless torch_compile=True", (True, False, None)),
        "steps_per_execution": ("leave it out: callbacks hear of every step, which costs little", (1, None)),
        "auto_scale_loss": ('mixed_precision="bf16" needs no scaling', (True, False)),
    },
    **dict.fromkeys(("fit", "evaluate", "predict"), _OF_DATA),
    "train_on_batch": {"reset_metrics": ("what it returns is of this batch alone", (True,))},
    "test_on_batch": {"reset_metrics": ("what it returns is of this batch alone", (True,))},
    **dict.fromkeys(("train", "TrainSpec", "EvalSpec"), _HOOKS),
    "save": {
        **_OVERWRITE,
        **_OPTIONS,
        "checkpoint_number": ("its name is step", ()),
        "check_interval": ("call save() where there is to be a checkpoint", (False,)),
        "save_format": (_FORMAT, _NONE),
        "include_optimizer": ("sg.Checkpoint(model=, optimizer=) saves it, and goes on from it", (False,)),
        "save_traces": (_FORMAT, (True,)),
        "signatures": (_PROGRAM, _NONE),
    },
    "write": {**_OPTIONS, "file_prefix": ("its name is folder", ())},
    "restore": _OPTIONS,
    "latest_checkpoint": {
        "checkpoint_dir": ("its name is directory", ()),
        "latest_filename": ("CheckpointManager(checkpoint_name=) keeps several apart", _NONE),
    },
    "load_checkpoint": {"ckpt_dir_or_file": ("its name is path", ())},
    "run": {"options": ("leave it out: they are of TPUs", _NONE)},
    **dict.fromkeys(("all_reduce", "all_gather"), _OPTIONS),
    "merge_call": {"merge_fn": ("its name is fn", ())},
    "distribute_dataset": {"dataset": ("its name is source", ())},
    "Variable": {
        "dtype": ("give initial_value=torch.tensor(value, dtype=…)", _NONE),
        "shape": ("it is that of initial_value, and stays", _NONE),
        "validate_shape": ("a variable keeps its shape", (True,)),
        "constraint": ("call it on the value, and assign what it returns", _NONE),
        **dict.fromkeys(("caching_device", "variable_def", "import_scope"), ("leave it out", _NONE)),
    },
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), _ASSIGNED),
    **{f"{kind}ClusterResolver": _RESOLVER for kind in ("TFConfig", "Simple", "Slurm", "Kubernetes")},
    "Model": {
        **dict.fromkeys(("inputs", "outputs"), ("give an nn.Module, whose forward makes outputs of inputs", ())),
        "name": ("leave it out", _NONE),
    },
    "summary": dict.fromkeys(
        ("line_length", "positions", "expand_nested", "show_trainable", "layer_range"), ("leave it out", (None, False))
    ),
    "TPUStrategy": {"tpu_cluster_resolver": ("its name is resolver", ())},
    "save_weights": {**_OVERWRITE, **_OPTIONS, "save_format": ("a folder is what load_weights reads", _NONE)},
    "load_weights": {**_OPTIONS, "by_name": (_FITTING, (False,)), "skip_mismatch": (_FITTING, (False,))},
    "load_model": {
        "custom_objects": ("a program needs none of its classes", _NONE),
        "compile": ("it evaluates and predicts, and is not trained", (False,)),
    },
    "ModelCheckpoint": {
        "period": ("save_freq= counts batches: as many as those epochs have", (1,)),
        "load_weights_on_restart": ("BackupAndRestore goes on, or load_weights(latest_checkpoint(…))", (False,)),
        "options": ("leave it out", _NONE),
    },
    "BackupAndRestore": {"double_checkpoint": ("leave it out: there is one backup at any time", (False,))},
    "TensorBoard": {
        **dict.fromkeys(("histogram_freq", "embeddings_freq"), (_DRAWN, (0,))),
        **dict.fromkeys(("write_graph", "write_images"), (_DRAWN, (False,))),
        "embeddings_metadata": (_DRAWN, _NONE),
        "write_steps_per_second": ("`stratagem status` shows it", (False,)),
        "profile_batch": ("`stratagem trace --torch` writes a timeline", (0,)),
    },
    "ReduceLROnPlateau": {"epsilon": ("its name is min_delta", ())},
    "RunConfig": {
        "tf_random_seed": ("its name is seed", ()),
        **dict.fromkeys(("session_config", "device_fn", "protocol"), (_PROCESSES, _NONE)),
        "experimental_distribute": ("give train_distribute= and eval_distribute=", _NONE),
        "experimental_max_worker_delay_secs": ("leave it out: workers begin when all are there", _NONE),
        "session_creation_timeout_secs": (_PROCESSES, (7200,)),
        "keep_checkpoint_every_n_hours": ("keep_checkpoint_max=None keeps all", (10000, None)),
        "log_step_count_steps": ("save_summary_steps= says it too", _NONE),
        "checkpoint_save_graph_def": ("leave it out: there is no graph", (True, False)),
    },
    "Estimator": {
        "warm_start_from": (
            'in model_fn: sg.get_or_create("net", make), where make() calls '
            "net.load_state_dict(sg.load_checkpoint(path))",
            _NONE,
        )
    },
    "EstimatorSpec": {
        "train_op": ("give optimizer=: the Estimator calls zero_grad, backward and step", _NONE),
        "eval_metric_ops": ('its name is metrics: {"accuracy": ("accuracy", outputs, targets)}', (None, {})),
        "export_outputs": ("what is exported are the predictions", _NONE),
        "scaffold": ("what sg.get_or_create makes is saved and restored", _NONE),
        **{f"{kind}_hooks": _HOOKS["hooks"] for kind in ("training", "training_chief", "evaluation", "prediction")},
    },
    **dict.fromkeys(("LatestExporter", "FinalExporter", "BestExporter"), _EXPORTER),
    "export_model": _EXPORTER,
    "model_to_estimator": {
        "keras_model": ("its name is model", ()),
        "custom_objects": ("leave it out", _NONE),
    },
    "DistributeOptions": {
        "experimental_fetch_to_device": ("batches go to the devices of the replicas", (True, None)),
        "experimental_per_replica_buffer_size": ("its name is prefetch", ()),
    },
    "PreemptionCheckpointHandler": {
        "cluster_resolver": ("leave it out: the strategy of the checkpoint knows the cluster", _NONE),
        "checkpoint_or_checkpoint_manager": ("its name is checkpoint_or_manager", ()),
        "termination_config": ("grace_s= says how long an end may take", _NONE),
    },
    "MinSizePartitioner": {"bytes_per_string": ("no variable here has strings", (16,))},
    "CheckpointManager": {
        "keep_checkpoint_every_n_hours": ("max_to_keep=None keeps all", _NONE),
        "step_counter": ("save(step) says the step", _NONE),
        "checkpoint_interval": ("call save() where there is to be a checkpoint", _NONE),
        "init_fn": ("call it where restore_or_initialize() gives None", _NONE),
    },
}
"""By the name of what is called."""


def way_out(called: str, name: str, value: Any) -> str | None:
    """What to write instead of an argument; "" where it asks for what is done anyway, None if it is unknown."""
    if (found := INSTEAD.get(called, {}).get(name)) is None:
        return None
    instead, same = found
    return "" if any(type(value) is type(one) and value == one for one in same) else instead
