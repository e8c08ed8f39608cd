"""A tensor with a value on every replica, and a rule for how the replicas change and read it together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from stratagem.arguments import checked, known_arguments
from stratagem.cluster.communication import ReduceOp
from stratagem.cluster.named_enum import NamedEnum
from stratagem.data.values import OnReplicas, PerReplica
from stratagem.errors import ConfigurationError, VariableError
from stratagem.strategy.base import Strategy
from stratagem.strategy.current import current_strategy
from stratagem.strategy.replicas.context import ReplicaContext, get_replica_context, replica_of
from stratagem.strategy.replicas.tensor_operators import TensorOperators
from stratagem.tensorflow_names import WithWaysOut


class VariableAggregation(NamedEnum):
    """How the values of several replicas become one."""

    NONE = "none"
    """They do not: an error where they would have to."""
    SUM = "sum"
    MEAN = "mean"
    """Floating dtypes only."""
    ONLY_FIRST_REPLICA = "only_first_replica"
    """That of replica 0 counts: for step counters."""


class VariableSynchronization(NamedEnum):
    """When the values of several replicas become one."""

    ON_WRITE = "on_write"
    """All replicas have the same value at all times; what they assign is aggregated first."""
    AUTO = ON_WRITE
    """TensorFlow's default, which every strategy here takes for ON_WRITE."""
    ON_READ = "on_read"
    """Each replica has a value of its own; reading outside of replicas aggregates. For metrics and statistics."""


_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}

_Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@checked
class Variable(TensorOperators, OnReplicas, WithWaysOut):
    """A named tensor that belongs to the strategy in whose scope it is created; outside any scope, a plain one.

    Inside ``strategy.run`` it is the value of the calling replica; elsewhere, of all replicas together. It takes
    part in arithmetic and in torch's functions like the tensor that :meth:`value` returns. In a job of several workers,
    every worker must create the same variables in the same order, and reading an ON_READ variable outside
    replicas is collective.

    Every replica starts with the initial value, the lead's if workers differ: an ON_READ variable that starts
    with 1 and is summed over two replicas reads 2.

    Args:
        initial_value: a tensor, number, array or nested list, or a function that makes one.
        aggregation: how replicas' values become one.
        synchronization: when they do.
        name: name used in messages.
        trainable: :meth:`value` needs gradients and stays the same ``nn.Parameter``, to be passed to an optimizer.
            (TensorFlow's default is True; here only models' parameters and variables marked trainable are trained.)

    Raises:
        ConfigurationError: incompatible arguments, or creation inside a step of several replicas.
    """

    def __init__(
        self,
        initial_value: Any,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        synchronization: VariableSynchronization | str = VariableSynchronization.ON_WRITE,
        name: str = "Variable",
        trainable: bool = False,
    ) -> None:
        aggregation, synchronization = VariableAggregation(aggregation), VariableSynchronization(synchronization)
        context = get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            raise ConfigurationError(
                f"variable {name!r} was created inside strategy.run, where every replica would create one; create it "
                "in strategy.scope(), before the step"
            )
        initial = _as_tensor(initial_value() if callable(initial_value) else initial_value).clone()
        if trainable and synchronization is VariableSynchronization.ON_READ:
            raise ConfigurationError(f"variable {name!r}: an ON_READ variable cannot be trainable; choose one")
        if trainable and not (initial.is_floating_point() or initial.is_complex()):
            raise ConfigurationError(f"variable {name!r}: only floating values are trainable, got {initial.dtype}")
        if aggregation is VariableAggregation.MEAN and not initial.is_floating_point():
            raise ConfigurationError(f"variable {name!r}: expected a floating dtype with MEAN, got {initial.dtype}")
        self.name = name
        self.aggregation = aggregation
        self.synchronization = synchronization
        self.trainable = trainable
        self._strategy = current_strategy()
        self._strategy.check_variable(name, trainable)
        self._devices = self._strategy.local_devices
        self._workers = self._strategy.communicator
        initial = self._of_the_lead(initial)
        places = self._devices
        if self._strategy.parameter_device is not None and synchronization is VariableSynchronization.ON_WRITE:
            places = (self._strategy.parameter_device,)  # one copy for all replicas
        copies = [initial.to(device, copy=True) for device in places]
        self.tensors: list[torch.Tensor] = [nn.Parameter(each) for each in copies] if trainable else copies
        """The value on each local replica, or the only one."""
        self._strategy.keep_variable(self)

    @property
    def shape(self) -> torch.Size:
        """Shape of the value on one replica."""
        return self.tensors[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.tensors[0].dtype

    # -- reading -----------------------------------------------------------------------------------------------

    def value(self) -> torch.Tensor:
        """The current value here; later assignments do not change it, unless it is trainable. Do not write to it.

        Raises:
            ConfigurationError: an ON_READ variable without aggregation, read outside replicas when it has several.
        """
        if (context := replica_of(self._strategy)) is not None:
            return self.value_on(self._local(context))
        if self.synchronization is VariableSynchronization.ON_WRITE:
            return self.tensors[0]
        return self._aggregate(PerReplica(tuple(self.tensors)), "reading")

    def value_on(self, replica: int) -> torch.Tensor:
        """The value of a local replica; a plain variable has the same on all."""
        replica %= self.num_values
        return self.tensors[self._index(replica)].to(self._devices[replica])

    @property
    def num_values(self) -> int:  # type: ignore[override]
        """Number of local replicas of the strategy that it belongs to."""
        return len(self._devices)

    @property
    def may_differ(self) -> bool:  # type: ignore[override]
        """Whether each replica keeps a value of its own."""
        return self.synchronization is VariableSynchronization.ON_READ

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the value as an array."""
        return np.array(self.value().detach().cpu().numpy())

    # -- writing -----------------------------------------------------------------------------------------------

    @known_arguments
    def assign(self, value: Any) -> Variable:
        """Sets the value.

        In a replica an ON_WRITE variable takes the aggregate of all replicas' values, so all of them must call
        this; an ON_READ variable is set on this replica alone. Outside replicas every replica gets ``value``, or its
        part of a :class:`PerReplica`; a summed ON_READ variable gets parts that add up to it.

        Returns:
            the variable.

        Raises:
            ConfigurationError: several replicas and no aggregation.
            VariableError: ``value`` has another shape, or a dtype that cannot be stored in the variable's.
        """
        return self._change(_replace, value)

    @known_arguments
    def assign_add(self, value: Any) -> Variable:
        """Adds to the value; like :meth:`assign`, but summed ON_READ variables refuse it outside replicas."""
        return self._change(torch.add, value)

    @known_arguments
    def assign_sub(self, value: Any) -> Variable:
        """Subtracts from the value; see :meth:`assign_add`."""
        return self._change(torch.sub, value)

    def _change(self, change: _Change, value: Any) -> Variable:
        if (context := replica_of(self._strategy)) is None:
            here = get_replica_context()
            if here is not None and here.num_replicas_in_sync > 1:
                raise ConfigurationError(
                    f"variable {self.name!r} was created outside the scope of {type(here.strategy).__name__}, so its "
                    f"{here.num_replicas_in_sync} replicas cannot change it together; create it in strategy.scope()"
                )
            self._change_outside(change, value)
        elif self.synchronization is VariableSynchronization.ON_READ or context.num_replicas_in_sync == 1:
            self._write(self._index(self._local(context)), change, self._fit(value))
        else:
            fitting = self._fit(value)
            self._check_aggregation("an assignment in a step")

            def merge(strategy: Strategy, values: PerReplica[torch.Tensor]) -> None:
                self._write_all(change, self._aggregate(values, "an assignment in a step"))

            merge.__qualname__ = f"assignment to {self.name!r}"  # what is said when replicas do not meet
            context.merge_call(merge, args=(fitting,))
        return self

    def _change_outside(self, change: _Change, value: Any) -> None:
        if isinstance(value, PerReplica):
            self._deal_out(change, value)
            return
        fitting = self._fit(value)
        num_replicas = self._strategy.num_replicas_in_sync
        on_read = self.synchronization is VariableSynchronization.ON_READ
        if not on_read or self.aggregation is not VariableAggregation.SUM or num_replicas == 1:
            self._write_all(change, fitting)
        elif change is not _replace:
            raise ConfigurationError(
                f"variable {self.name!r} is the sum of what {num_replicas} replicas hold; outside of strategy.run it "
                "can be set with assign, but not added to"
            )
        elif self.dtype.is_floating_point:
            self._write_all(change, fitting / num_replicas)
        else:
            self._write_all(change, torch.zeros_like(fitting))
            if self._workers is None or self._workers.rank == 0:
                self._write(0, change, fitting)

    def _deal_out(self, change: _Change, value: PerReplica[Any]) -> None:
        parts = tuple(self._fit(part) for part in value.values)
        if len(parts) != len(self._devices):
            raise VariableError(
                f"variable {self.name!r} has {len(self._devices)} local replicas, and was assigned a value for each of "
                f"{len(parts)}"
            )
        if self.synchronization is VariableSynchronization.ON_READ:
            for index, part in enumerate(parts):
                self._write(index, change, part)
        else:
            self._write_all(change, self._aggregate(PerReplica(parts), "an assignment of one value per replica"))

    def _write_all(self, change: _Change, value: torch.Tensor) -> None:
        for index in range(len(self.tensors)):
            self._write(index, change, value)

    @torch.no_grad()
    def _write(self, index: int, change: _Change, value: torch.Tensor) -> None:
        old = self.tensors[index]
        new = change(old.detach(), value.to(old.device)).to(old.dtype)
        if self.trainable:
            old.copy_(new)
        else:
            self.tensors[index] = new

    # -- replicas ----------------------------------------------------------------------------------------------

    def _local(self, context: ReplicaContext) -> int:
        return context.replica_id_in_sync_group % len(self._devices)

    def _index(self, replica: int) -> int:
        """Which tensor holds the value of a local replica."""
        return replica if len(self.tensors) > 1 else 0

    def _aggregate(self, values: PerReplica[torch.Tensor], doing: str) -> torch.Tensor:
        if self._strategy.num_replicas_in_sync == 1:
            return values.values[0]
        self._check_aggregation(doing)
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._of_the_lead(values.values[0])
        total: torch.Tensor = self._strategy.reduce(_OPS[self.aggregation], values)
        return total.to(self.dtype)

    def _of_the_lead(self, tensor: torch.Tensor) -> torch.Tensor:
        """The lead's ``tensor``, on every worker."""
        return tensor if self._workers is None else self._workers.broadcast(tensor.detach().clone())

    def _check_aggregation(self, doing: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ConfigurationError(
                f"{doing} makes one value of those of {self._strategy.num_replicas_in_sync} replicas, but variable "
                f"{self.name!r} was created without aggregation; create it with aggregation="
                "sg.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )

    def _fit(self, value: Any) -> torch.Tensor:
        tensor = _as_tensor(value)
        if tensor.shape != self.shape or not torch.can_cast(tensor.dtype, self.dtype):
            raise VariableError(
                f"variable {self.name!r} is {list(self.shape)} {self.dtype}, and was assigned {list(tensor.shape)} "
                f"{tensor.dtype}"
            )
        return tensor.to(self.dtype)

    # -- copies ------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.tensors = [copy.deepcopy(tensor, memo) for tensor in self.tensors]
        self._strategy.keep_variable(twin)
        return twin

    def __copy__(self) -> Variable:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        value = self.value().detach()
        return type(self), (value, self.aggregation, self.synchronization, self.name, self.trainable)

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {list(self.shape)} {self.dtype} of {len(self._devices)} local replicas>"


def keep_variables(strategy: Strategy, replica: int, memo: dict[int, Any]) -> None:
    """Makes deep copies of models and optimizers for a local replica use the variables' values there, by the ``memo``
    that ``copy.deepcopy`` is about to be given."""
    for variable in strategy.variables():
        memo[id(variable)] = variable
        memo[id(variable.tensors[0])] = variable.tensors[variable._index(replica)]


def _replace(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.clone()


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, Variable):
        value = value.value()
    return torch.as_tensor(value).detach()
