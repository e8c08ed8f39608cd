"""Arguments and attributes that Keras and TensorFlow have and nothing here does: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

Foreign = Mapping[str, tuple[str, tuple[Any, ...]]]
"""By the argument's name: the way out, and the values that ask for what is done anyway."""

_NONE = (None,)
_DATA = "DataLoader(..., num_workers=, prefetch_factor=) says how data is read"
_DRAWN = "a callback of your own writes it, in on_epoch_end, with torch.utils.tensorboard.SummaryWriter"
_HOOK = "what a hook would do, model_fn does in each step, and a function of saving_listeners= at each checkpoint"
_PROCESSES = "train_distribute= says on which devices, `stratagem run` in which processes"
_PROGRAM = "example_inputs= says what the exported program is called with"
_FITTING = "module.load_state_dict(state, strict=False) before compile takes what fits"
_HOOKS: Foreign = {"hooks": (_HOOK, (None, [], ()))}
_OVERWRITE: Foreign = {"overwrite": ("what is there is replaced", (True,))}
_OF_DATA: Foreign = {
    "workers": (_DATA, (0, 1, None)),
    "use_multiprocessing": (_DATA, (False, None)),
    "max_queue_size": (_DATA, (10, None)),
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
    "save": {**_OVERWRITE, "checkpoint_number": ("its name is step", ())},
    "save_weights": _OVERWRITE,
    "load_weights": {"by_name": (_FITTING, (False,)), "skip_mismatch": (_FITTING, (False,))},
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


_EXPORT = "export_model(path, example_inputs) writes a program that torch runs alone"
_VALUES = "sg.load_checkpoint(estimator.latest_checkpoint()) gives the weights by name"
_GENERATOR = "{} takes generators too"
_WEIGHTS = "state_dict() and load_state_dict() have the weights, by name"
_PARAMETERS = "model.module has parameters(), children() and all that an nn.Module has"

_RESTORED = "leave it out: restore() raises where an object finds no state, and state without an object is left alone"
_PLACE = "sg.is_lead() says whether this process saves, sg.TFConfigClusterResolver() what its cluster and its task are"

_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "Restored": dict.fromkeys(
        ("expect_partial", "assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"), _RESTORED
    ),
    "RunConfig": {
        **dict.fromkeys(("is_chief", "cluster_spec", "task_type", "task_id", "master", "evaluation_master"), _PLACE),
        **dict.fromkeys(("num_worker_replicas", "num_ps_replicas", "global_id_in_cluster"), _PLACE),
        "replace": "dataclasses.replace(config, seed=1) makes another",
    },
    "Estimator": {
        **dict.fromkeys(("export_saved_model", "export_savedmodel", "experimental_export_all_saved_models"), _EXPORT),
        **dict.fromkeys(("get_variable_names", "get_variable_value"), _VALUES),
        "eval_dir": "<model_dir>/eval has the summaries of evaluations",
    },
    "Model": {
        **{f"{name}_generator": _GENERATOR.format(name) for name in ("fit", "evaluate", "predict")},
        **dict.fromkeys(("get_weights", "set_weights"), _WEIGHTS),
        **dict.fromkeys(("layers", "get_layer", "weights", "trainable_variables", "trainable_weights"), _PARAMETERS),
        "add_loss": "give compile(loss=f), where f(outputs, targets) adds it",
        "export": "save(path) writes a program that torch runs alone",
        "to_json": "save(path) writes a program that torch runs alone",
    },
}
"""By the name of the class."""


class WithWaysOut:
    """What a class of TensorFlow's or Keras's has, and that of the same name here has not, says what to write."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            for kind in type(self).__mro__:
                if hint := _ATTRIBUTES.get(kind.__name__, {}).get(name):
                    raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {hint}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
