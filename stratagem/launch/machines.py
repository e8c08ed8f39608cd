"""The machines that tasks request. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stratagem.arguments import checked, nearest
from stratagem.errors import ConfigurationError

MOST = 1_000_000
"""No machine has as many cores, GiB or accelerators."""


@checked
@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """The resources one task needs from its machine; names as in TensorFlow Cloud.

    Raises:
        ConfigurationError: a count is negative, a number is nearly 0 or too large, or accelerators have no type.
    """

    cpu_cores: float = 1
    """Cores."""
    memory_gib: float = 2
    """Memory in GiB: both the request and the limit."""
    accelerator_type: str = ""
    """The cluster's name of the accelerator, for example "nvidia-tesla-t4"; empty: any, or none."""
    accelerator_count: int = 0
    """Accelerators of this task."""

    def __post_init__(self) -> None:
        # Less would be written as 0, and a limit of 0 is none.
        sizes = (self.cpu_cores, self.memory_gib)
        if not (all(0.001 <= size < MOST for size in sizes) and 0 <= self.accelerator_count < MOST):
            raise ConfigurationError(
                "expected a machine with cpu_cores and memory_gib of at least 0.001 and no negative accelerator_count, "
                f"less than {MOST} of each, got {self}"
            )
        if self.accelerator_type and not self.accelerator_count:
            raise ConfigurationError(
                f"expected accelerator_count of at least 1 with accelerator_type={self.accelerator_type!r}, got 0"
            )


COMMON_MACHINE_CONFIGS: Mapping[str, MachineConfig] = {
    "CPU": MachineConfig(cpu_cores=4, memory_gib=15),
    "T4_1X": MachineConfig(8, 30, "nvidia-tesla-t4", 1),
    "T4_4X": MachineConfig(16, 60, "nvidia-tesla-t4", 4),
    "V100_1X": MachineConfig(8, 30, "nvidia-tesla-v100", 1),
    "V100_4X": MachineConfig(16, 60, "nvidia-tesla-v100", 4),
    "A100_1X": MachineConfig(12, 85, "nvidia-tesla-a100", 1),
    "A100_8X": MachineConfig(96, 680, "nvidia-tesla-a100", 8),
    "H100_1X": MachineConfig(26, 234, "nvidia-h100-80gb", 1),
    "H100_8X": MachineConfig(208, 1872, "nvidia-h100-80gb", 8),
}
"""Machines by the names people use. "auto" is ``"CPU"``, and for a chief beside workers that of ``TASK_MACHINES``."""


def parse_machine(text: str) -> MachineConfig:
    """The machine of a name, or of figures: "4:16" (cores, GiB), "4:16:1" (and GPUs). ConfigurationError: it is
    neither; offers the nearest name."""
    if text in COMMON_MACHINE_CONFIGS:
        return COMMON_MACHINE_CONFIGS[text]
    cores, _, rest = text.partition(":")
    memory, _, gpus = rest.partition(":")
    try:
        return MachineConfig(float(cores), float(memory), accelerator_count=int(gpus or 0))
    except ValueError:
        raise ConfigurationError(
            f"expected a machine like 4:16 (cores, GiB) or 4:16:1 (and GPUs), or one by name, got {text!r}; "
            f"{nearest(text.upper(), COMMON_MACHINE_CONFIGS)}"
        ) from None


TASK_MACHINES: Mapping[str, MachineConfig] = {
    "chief": MachineConfig(cpu_cores=0.1, memory_gib=0.5),
    "ps": MachineConfig(cpu_cores=0.2, memory_gib=1),
    "worker": MachineConfig(cpu_cores=0.4, memory_gib=1),
}
"""What a task asks for where nobody says, in the manifests of deploy/ as in `stratagem render`: two workers and two
parameter servers fit on a node of two cores. Cores are what is kept free for a task; it may use what others leave."""
