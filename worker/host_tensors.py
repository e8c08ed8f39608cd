"""Tensors of the model as flat host memory: where frames are read from and written to, on CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Pieces
from stratagem.worker.layout import Chunk, Layout


class WeightTargets:
    """Writes frames of weights into tensors, and reads values out of them.

    A contiguous CPU tensor is written in place. Any other gets a flat host mirror that :meth:`finish` copies over.

    Args:
        layout: where the rows live.
        tensors: the variables' tensors, in the order of ``layout.variables``.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self.tensors = list(tensors)
        self._mirrors: dict[int, torch.Tensor] = {}
        self._dirty: set[int] = set()

    @torch.no_grad()
    def write(self, ps: int, frame: Frame) -> None:
        """Copies one frame that came from ``ps`` to where its elements belong."""
        for span, position in self._layout.spans_between(frame.group, ps, frame.offset, frame.tensor.numel()):
            source = frame.tensor[position : position + span.num_elements]
            self._flat(span.variable)[span.start : span.start + span.num_elements].copy_(source)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes everything written visible in the tensors."""
        for index in self._dirty:
            tensor = self.tensors[index]
            tensor.copy_(self._mirrors[index].view(tensor.shape), non_blocking=True)
        self._dirty.clear()

    def pieces(self, chunk: Chunk) -> Pieces:
        """The current values of a chunk, to be sent."""
        return lambda: [
            self.tensors[span.variable].detach().cpu().reshape(-1)[span.start : span.start + span.num_elements]
            for span in chunk.spans
        ]

    def _flat(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.view(-1)
        mirror = self._mirrors.get(index)
        if mirror is None:
            on_gpu = tensor.device.type == "cuda"
            mirror = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=on_gpu)
            self._mirrors[index] = mirror
        if index not in self._dirty:
            if tensor.device.type == "cuda":
                torch.cuda.current_stream(tensor.device).synchronize()  # the last copy out of the mirror is done
            mirror.copy_(tensor.reshape(-1))  # a frame may bring a part of the tensor only
            self._dirty.add(index)
        return mirror


class GradientSource:
    """Gradients as pieces to send. CUDA gradients go to pinned memory on a side stream, while backward goes on."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._pinned: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pieces(self, chunk: Chunk) -> Pieces:
        """The gradients of a chunk as they are now; zeros where a parameter has none.

        The values are read when the lane sends. Whoever changes a gradient after this call must stage it again.
        """
        parts: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        for span in chunk.spans:
            parameter = self._parameters[span.variable]
            gradient = parameter.grad
            if gradient is None:
                parts.append((torch.zeros(span.num_elements, dtype=parameter.dtype), None))
                continue
            flat = gradient.detach().to(parameter.dtype).reshape(-1)[span.start : span.start + span.num_elements]
            parts.append(self._to_host(flat, span.variable, span.start))

        def ready() -> Sequence[torch.Tensor]:
            for _, event in parts:
                if event is not None:
                    event.synchronize()
            return [tensor for tensor, _ in parts]

        return ready

    def _to_host(self, flat: torch.Tensor, variable: int, start: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if flat.device.type == "cpu":
            return flat, None
        whole = self._pinned.get(variable)
        if whole is None:
            whole = torch.empty(self._parameters[variable].numel(), dtype=flat.dtype, pin_memory=True)
            self._pinned[variable] = whole
        pinned = whole[start : start + flat.numel()]
        side = self._streams.get(flat.device)
        if side is None:
            side = self._streams[flat.device] = torch.cuda.Stream(flat.device)
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            pinned.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        flat.record_stream(side)
        return pinned, event
