"""Tensors of the model as flat host memory: where frames are read from and written to, on CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Pieces
from stratagem.worker.push.layout import Chunk, Layout, Span

TINY_ELEMENTS = 4096
"""Tensors up to this size, as a mean of a frame's, are put together before they are sent: a call for each of a model's
norms and biases costs more than their bytes."""


class WeightTargets:
    """Writes frames of weights into tensors, and reads values out of them.

    A contiguous CPU tensor is written in place. Any other gets a flat host mirror that :meth:`finish` copies over.
    ``tensors``: in the order of ``layout.variables``.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self.tensors = list(tensors)
        self._flats: dict[int, tuple[int, torch.Tensor]] = {}
        """Of contiguous CPU tensors, where their elements lie, and a flat view on them."""
        self._mirrors: dict[int, torch.Tensor] = {}
        self._mirrored: dict[int, tuple[int, int]] = {}
        """Where a tensor lay, and its version, when its mirror had what it has."""
        self._dirty: set[int] = set()
        self._placed: torch.Tensor | None = None
        """The newest that :meth:`place` gave."""
        self._spans: dict[tuple[int, int, int, int], tuple[list[Span], list[int]]] = {}
        """Of the frames that came so far: what lies in them, and how many elements of each."""

    def rerouted(self) -> None:
        """The layout has changed."""
        self._spans.clear()

    def place(self, ps: int, group: int, offset: int, num_elements: int) -> torch.Tensor | None:
        """Where a frame from ``ps`` may be received: its elements are those of one contiguous CPU tensor."""
        self._placed = None
        if (group, ps) in self._layout.shards:
            spans, sizes = self._within(group, ps, offset, num_elements)
            if sizes == [num_elements] and self._lies_flat(spans[0].variable):
                self._placed = self._target(spans[0])
        return self._placed

    def write(self, ps: int, frame: Frame) -> None:
        """Copies one frame that came from ``ps`` to where its elements belong, unless it was received there."""
        if frame.tensor is self._placed:
            torch.autograd.graph.increment_version(frame.tensor)  # a graph that has saved the old values must not go on
            return
        num_elements = frame.tensor.numel()
        spans, sizes = self._within(frame.group, ps, frame.offset, num_elements)
        if not spans:
            return
        targets = [self._target(span) for span in spans]
        if len(spans) == 1:
            targets[0].copy_(frame.tensor if sizes[0] == num_elements else frame.tensor[: sizes[0]])
        else:
            torch._foreach_copy_(targets, frame.tensor[: sum(sizes)].split(sizes))

    def finish(self) -> None:
        """Makes everything written visible in the tensors."""
        if self._dirty:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        for index in self._dirty:
            tensor = self.tensors[index]
            tensor.copy_(self._mirrors[index].view(tensor.shape), non_blocking=True)
            self._mirrored[index] = tensor.data_ptr(), tensor._version
        self._dirty.clear()

    def pieces(self, chunk: Chunk) -> Pieces:
        """The current values of a chunk, to be sent."""
        return lambda: [
            self.tensors[span.variable].detach().cpu().reshape(-1)[span.start : span.start + span.num_elements]
            for span in chunk.spans
        ]

    def _within(self, group: int, ps: int, offset: int, num_elements: int) -> tuple[list[Span], list[int]]:
        key = group, ps, offset, num_elements
        found = self._spans.get(key)
        if found is None:
            spans = [span for span, _ in self._layout.spans_between(*key)]
            found = self._spans[key] = spans, [span.num_elements for span in spans]
        return found

    def _lies_flat(self, index: int) -> bool:
        tensor = self.tensors[index]
        return tensor.is_cpu and tensor.is_contiguous()

    def _target(self, span: Span) -> torch.Tensor:
        flat = self._flat(span.variable)
        return flat if span.num_elements == flat.numel() else flat[span.start : span.start + span.num_elements]

    def _flat(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        address, flat = self._flats.get(index, (0, tensor))
        if address and tensor.data_ptr() == address and tensor.is_contiguous():
            return flat
        if self._lies_flat(index):
            flat = tensor.detach().view(-1)
            self._flats[index] = flat.data_ptr(), flat
            return flat
        mirror = self._mirrors.get(index)
        if mirror is None:
            on_gpu = tensor.device.type == "cuda"
            mirror = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=on_gpu)
            self._mirrors[index] = mirror
        if index not in self._dirty:
            if tensor.device.type == "cuda":
                torch.cuda.current_stream(tensor.device).synchronize()  # the last copy out of the mirror is done
            if self._mirrored.get(index) != (tensor.data_ptr(), tensor._version):
                mirror.copy_(tensor.detach().reshape(-1))  # a frame may bring a part of the tensor only
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
            flat = gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)
            flat = flat.detach().reshape(-1) if flat.requires_grad else flat.reshape(-1)
            if span.num_elements < flat.numel():
                flat = flat[span.start : span.start + span.num_elements]
            parts.append((flat, None) if flat.is_cpu else self._to_host(flat, span.variable, span.start))

        def ready() -> Sequence[torch.Tensor]:
            for _, event in parts:
                if event is not None:
                    event.synchronize()
            tensors = [tensor for tensor, _ in parts]
            are_tiny = chunk.num_elements <= TINY_ELEMENTS * len(tensors)
            return [torch.cat(tensors)] if are_tiny and len(tensors) > 1 else tensors

        return ready

    def _to_host(self, flat: torch.Tensor, variable: int, start: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
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
