"""Arguments, names and attributes that Keras and TensorFlow have and nothing here does: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

Foreign = Mapping[str, tuple[str, tuple[Any, ...]]]
"""By the argument's name: the way out, and the values that ask for what is done anyway."""

_NONE = (None,)
_DATA = "DataLoader(..., num_workers=, prefetch_factor=) says how data is read"
_DRAWN = "a callback of your own writes it, in on_epoch_end, with torch.utils.tensorboard.SummaryWriter"
_HOOK = "what a hook would do, model_fn does in each step, and a function of saving_listeners= at each checkpoint"
_EARLY = "Model.fit takes callbacks.EarlyStopping; of an Estimator call train(steps=) and evaluate() in turn"
_PROCESSES = "train_distribute= says on which devices, `stratagem run` in which processes"
_PROGRAM = "example_inputs= says what the exported program is called with"
_FITTING = "module.load_state_dict(state, strict=False) before compile takes what fits"
_HOOKS: Foreign = {"hooks": (_HOOK, (None, [], ()))}
_OVERWRITE: Foreign = {"overwrite": ("what is there is replaced", (True,))}
_OUT = "leave it out"
_OPTIONS: Foreign = {"options": (_OUT, _NONE)}
_FORMAT = "save() has one format, a folder that sg.load_model reads"
_ASSIGNED: Foreign = {
    "use_locking": (_OUT, (False, None)),
    "read_value": (_OUT, (True,)),
    "name": (_OUT, _NONE),
}
_RESOLVER: Foreign = {
    "rpc_layer": ("it is gRPC", ("grpc", None)),
    **dict.fromkeys(("master", "environment"), (_OUT, ("", None))),
    "num_accelerators": ("the strategy has devices=", ({}, None)),
    **dict.fromkeys(("gpus_per_node", "gpus_per_task", "tasks_per_node"), ("Slurm says it to each task", _NONE)),
    "auto_set_gpu": ("srun --gpus-per-task gives each task its own", (False,)),
    **dict.fromkeys(("job_to_label_mapping", "override_client"), ("TF_CONFIG says the cluster", _NONE)),
}
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
    "all_gather": _OPTIONS,
    **{name: {**_OPTIONS, "reduce_op": ("its name is op", ())} for name in ("reduce", "all_reduce")},
    "merge_call": {"merge_fn": ("its name is fn", ())},
    "distribute_dataset": {"dataset": ("its name is source", ())},
    "Variable": {
        "dtype": ("give initial_value=torch.tensor(value, dtype=…)", _NONE),
        "shape": ("it is that of initial_value, and stays", _NONE),
        "validate_shape": ("a variable keeps its shape", (True,)),
        "constraint": ("call it on the value, and assign what it returns", _NONE),
        **dict.fromkeys(("caching_device", "variable_def", "import_scope"), (_OUT, _NONE)),
    },
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), _ASSIGNED),
    **{f"{kind}ClusterResolver": _RESOLVER for kind in ("TFConfig", "Simple", "Slurm", "Kubernetes")},
    "Model": {
        **dict.fromkeys(("inputs", "outputs"), ("give an nn.Module, whose forward makes outputs of inputs", ())),
        "name": (_OUT, _NONE),
    },
    "summary": dict.fromkeys(
        ("line_length", "positions", "expand_nested", "show_trainable", "layer_range"), (_OUT, (None, False))
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
        "options": (_OUT, _NONE),
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
        "custom_objects": (_OUT, _NONE),
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

_COORDINATOR = (
    "there is no ClusterCoordinator: every worker runs the script itself, and takes its batches from "
    "strategy.distribute_dataset"
)
_ANY_CLUSTER = "sg.SimpleClusterResolver takes any cluster and a place in it"
_MODEL_FN = "give sg.Estimator a model_fn, or sg.model_to_estimator an sg.Model"
_LOADER = "do that to the loader, before distribute_dataset"
_OWN_STEP = "for a step of your own write the loop, with strategy.run(step, args=(batch,))"
_COMPILED = "model.compiled has what compile was told"
_LOGGED = "what fit and evaluate return, and callbacks get, has the values by name"
_TENSOR = "value() is a tensor of torch"

_OF_DATASETS: Mapping[str, str] = {
    "element_spec": "leave it out: no step is traced, and batches look as the loader makes them",
    "cardinality": "len() says how many steps an epoch has",
    "get_next_as_optional": "next(iterator, None) gives None at the end",
    "as_numpy_iterator": "its batches are tensors of torch",
    "enumerate": "enumerate(dataset) numbers the batches",
    "take": "itertools.islice(dataset, number) takes so many",
    "repeat": "each iter() is the next epoch",
    "reduce": "loop over its batches, and strategy.reduce what the step returns",
    **dict.fromkeys(("dataset", "batch_size", "sampler"), "ask the loader that distribute_dataset was given"),
    **dict.fromkeys(("map", "batch", "unbatch", "prefetch", "shuffle", "cache", "filter", "skip"), _LOADER),
    **dict.fromkeys(("shard", "options", "with_options"), "distribute_dataset(options=) says who gets what"),
}

_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "stratagem": {
        **dict.fromkeys(("coordinator", "ClusterCoordinator"), _COORDINATOR),
        "Server": "a ps serves inside the constructor of the strategy: start the same script in every task",
        "SidecarEvaluator": "an evaluator's script loops over sg.new_checkpoints()",
        "InputOptions": "its name is DistributeOptions",
        "CollectiveHints": "its name is CommunicationOptions",
        "RunOptions": "leave it out: they are of TPUs",
        "TerminationConfig": "PreemptionCheckpointHandler(grace_s=) says how long an end may take",
        "PreemptionWatcher": "its name is PreemptionCheckpointHandler",
        "DistributedValues": "its name is PerReplica",
        **dict.fromkeys(("DistributedDataset", "DistributedIterator"), "it is what distribute_dataset returns"),
        **dict.fromkeys(("StrategyExtended", "InputReplicationMode", "CheckpointOptions", "compat"), _OUT),
        "ClusterResolver": "what has task and cluster_spec() is one",
        "Partitioner": "a function of shape and dtype is one, which returns the number of shards by axis",
        **{f"{name}Resolver": _ANY_CLUSTER for name in ("GCECluster", "SageMakerCluster", "UnionCluster", "Union")},
        **dict.fromkeys(("tpu", "TPUClusterResolver"), "sg.TPUStrategy() asks torch_xla where the TPUs are"),
        "checkpoints_iterator": "its name is new_checkpoints",
        "get_checkpoint_state": "latest_checkpoint(directory) says where the newest is",
        **dict.fromkeys(("list_variables", "load_variable"), "load_checkpoint(path) gives the weights by name"),
        "Saver": "its name is Checkpoint",
        "get_or_create_global_step": "its name is get_global_step",
        "MonitoredTrainingSession": "write the loop, or use Model.fit or Estimator",
        **{
            f"{kind}{what}": _MODEL_FN
            for kind in ("DNN", "Linear", "Baseline", "DNNLinearCombined", "BoostedTrees")
            for what in ("Classifier", "Regressor", "Estimator")
        },
        **{f"stop_if_{when}_hook": _EARLY for when in ("higher", "lower", "no_increase", "no_decrease")},
        "make_early_stopping_hook": _EARLY,
        **dict.fromkeys(("WarmStartSettings", "init_from_checkpoint"), _FITTING),
        "feature_column": "sg.nn.Embedding and EmbeddingBag are columns of categories, and a module makes the others",
        "inputs": "an input_fn returns a DataLoader, or batches",
        "export": "Estimator.export_model(path, example_inputs) writes a program that torch runs alone",
        "saved_model": "Model.save writes a program, and sg.load_model reads it",
        "data": "a DataLoader of torch, or an iterable of batches, is what distribute_dataset takes",
        "models": "leave it out: sg.load_model, sg.Model",
        "utils": "torch.manual_seed() sets the seed, torch.nn.functional.one_hot makes one-hot rows, and instead of a "
        "DatasetCreator fit takes a DataLoader of global batches; an evaluator loops over sg.new_checkpoints()",
        **dict.fromkeys(("Sequential", "Input"), "sg.Model takes a module, torch.nn.Sequential(…) for one"),
        **dict.fromkeys(("layers", "activations"), "they are those of torch.nn"),
        **dict.fromkeys(("initializers", "regularizers"), "torch.nn.init, and weight_decay= of an optimizer"),
        "optimizers": "they are those of torch.optim, or their names",
        "losses": "they are those of torch.nn, functions, or their names",
        "metrics": "they are those of torchmetrics, functions, or their names",
        "mixed_precision": 'give compile(mixed_precision="bf16"), or use torch.autocast in the step',
        "function": "leave it out; prepare(torch_compile=True) compiles a model",
        **dict.fromkeys(("GradientTape", "constant", "random", "device", "Module", "math", "cast"), "use plain torch"),
        "config": "the devices of a strategy are its arguments; torch.cuda.device_count() counts those that are here",
        "summary": "torch.utils.tensorboard.SummaryWriter writes them, where sg.is_lead()",
    },
    "stratagem.training.callbacks": {
        **dict.fromkeys(("ProgbarLogger", "BaseLogger"), "fit(verbose=) says what is shown"),
        "RemoteMonitor": "LambdaCallback(on_epoch_end=) can send the logs",
        "SwapEMAWeights": "torch.optim.swa_utils.AveragedModel averages them, in a loop of your own",
        "CallbackList": "fit, evaluate and predict take a list",
        "experimental": _OUT,
    },
    "stratagem.data": {
        "Dataset": "a DataLoader of torch, or an iterable of batches, is what distribute_dataset takes",
        "experimental": "leave data.experimental out: sg.AutoShardPolicy",
        "Options": "sg.DistributeOptions(auto_shard_policy=)",
        "AUTOTUNE": _DATA,
    },
    "stratagem.nn": dict.fromkeys(("embedding_lookup", "embedding_lookup_sparse"), "sg.nn.Embedding looks rows up"),
    "stratagem.errors": {
        "OutOfRangeError": "get_next() ends with StopIteration; for loops end by themselves",
        **dict.fromkeys(("UnavailableError", "AbortedError"), "sg.CollectiveError and sg.PeerUnavailableError are"),
        **dict.fromkeys(("NotFoundError", "DataLossError"), "of a checkpoint it is sg.CheckpointError"),
    },
    "Strategy": {
        "cluster_resolver": "all workers save to one path, and the lead writes; sg.is_lead() says which process it is",
        "experimental_run_v2": "its name is run",
        "extended": "strategy.local_devices and parameter_device say where replicas compute and variables are",
        "unwrap": "its name is local_results",
        **dict.fromkeys(("make_dataset_iterator", "make_input_fn_iterator"), "iter(distribute_dataset(loader))"),
        "experimental_make_numpy_dataset": "distribute_dataset(TensorDataset(inputs, targets), batch_size=)",
        **{
            f"experimental_{name}": "a tensor is on one device"
            for name in ("assign_to_logical_device", "split_to_logical_devices", "replicate_to_logical_devices")
        },
        **dict.fromkeys(("configure", "update_config_proto", "initialize", "finalize", "colocate_vars_with"), _OUT),
    },
    **dict.fromkeys(("SplitDataset", "DistributedDataset", "DistributedIterator"), _OF_DATASETS),
    "ReplicaContext": {
        "devices": "a step finds its tensors on its own device",
        "update": "variable.assign() in the step changes it on all replicas",
        "reduce_to": "all_reduce() gives the sum to all",
        "synchronization": "get_replica_context() is None outside of a step",
    },
    "Variable": {
        **dict.fromkeys(("read_value", "initialized_value", "eval", "read"), "its name is value()"),
        "get_shape": "its name is shape",
        "set_shape": "it is that of the first value, and stays",
        **dict.fromkeys(("initializer", "initial_value", "op", "constraint", "handle", "graph"), _OUT),
        **{
            f"{kind}{how}": f"{_TENSOR}, and assign() takes what is made of it"
            for kind in ("scatter_", "scatter_nd_", "batch_scatter_")
            for how in ("add", "sub", "update", "mul", "div", "min", "max")
        },
        **dict.fromkeys(("sparse_read", "gather_nd", "device", "ndim"), _TENSOR),
        "values": "tensors has those of the local replicas",
        **dict.fromkeys(("ref", "experimental_ref"), "a variable can be a key itself"),
    },
    "Checkpoint": {
        "read": "restore() reads what write() wrote, too",
        "save_counter": "restore(path).step is the number of a checkpoint, and save(step=) says it",
        "sync": "its name is wait()",
    },
    "CheckpointManager": {
        "sync": "manager.checkpoint.wait() waits until it is written",
        "checkpoint_interval": "call save() where there is to be a checkpoint",
        "reset_save_counter": "save(step) says the step",
    },
    "_Resolved": {
        **dict.fromkeys(("master", "get_master"), "cluster_spec().as_dict() has all addresses"),
        "num_accelerators": "strategy.local_devices says where replicas compute",
        "environment": _OUT,
    },
    "ClusterSpec": {
        **dict.fromkeys(("as_cluster_def", "task_address"), "job_tasks(role) has the addresses, by index"),
        "task_indices": "range(num_tasks(role)) are they",
    },
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
        **dict.fromkeys(("layers", "get_layer", "count_params", "build", "built"), _PARAMETERS),
        **dict.fromkeys(("parameters", "named_parameters", "children", "modules", "train", "eval", "to"), _PARAMETERS),
        **{
            f"{kind}{what}": _PARAMETERS
            for kind in ("", "trainable_", "non_trainable_")
            for what in ("variables", "weights")
        },
        **dict.fromkeys(("name", "dtype", "inputs", "outputs", "input_shape", "output_shape"), _PARAMETERS),
        "trainable": "module.requires_grad_(False) before compile",
        "distribute_strategy": "its name is strategy",
        **dict.fromkeys(("get_config", "from_config", "to_yaml"), "the class of the module says how it is made"),
        **dict.fromkeys(("get_compile_config", "compile_from_config", "loss", "run_eagerly", "jit_compile"), _COMPILED),
        **dict.fromkeys(("metrics", "metrics_names", "compute_metrics", "get_metrics_result", "losses"), _LOGGED),
        **dict.fromkeys(("reset_metrics", "reset_states"), "each epoch and each evaluate begins anew"),
        **dict.fromkeys(("add_metric", "compiled_metrics"), "give compile(metrics=)"),
        **dict.fromkeys(("predict_classes", "predict_proba"), "predict() gives a tensor: argmax(1), softmax(1)"),
        **{f"{kind}_step": _OWN_STEP for kind in ("train", "test", "predict")},
        **dict.fromkeys(("train_function", "make_train_function", "compute_loss", "compiled_loss"), _OWN_STEP),
        "call": "model(inputs) calls the module",
        "add_loss": "give compile(loss=f), where f(outputs, targets) adds it",
        **dict.fromkeys(("export", "to_json"), "save(path) writes a program that torch runs alone"),
    },
}
"""By the name of the class, or of the module."""


def no_attribute(owner: str, name: str, *kinds: str) -> AttributeError:
    """Says that ``owner``, one of ``kinds``, has no ``name``, and what to write instead."""
    hint = _HOOK if name.endswith(("Hook", "SaverListener")) else ""
    hint = next((found for kind in kinds if (found := _ATTRIBUTES.get(kind, {}).get(name))), hint)
    return AttributeError(f"{owner} has no attribute {name!r}{': ' if hint else ''}{hint}")


class WithWaysOut:
    """For a name that a class of TensorFlow, Keras or torch has and this one lacks, the error says what to write."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kinds = [kind.__name__ for kind in type(self).__mro__]
            raise no_attribute(kinds[0], name, *kinds)
