"""Tensors of the model as flat host memory, the source and target of frames; CPU and CUDA."""

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
        self._settled: set[torch.device] = set()
        """GPUs that have copied out of all mirrors what they were given last."""
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
        written = [self.tensors[index] for index in self._dirty]
        mirrors = [self._mirrors[index].view(self.tensors[index].shape) for index in self._dirty]
        torch._foreach_copy_(written, mirrors, non_blocking=True)
        for index, tensor in zip(self._dirty, written, strict=True):
            self._mirrored[index] = tensor.data_ptr(), tensor._version
        self._dirty.clear()
        self._settled.clear()

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
            spans = list(self._layout.spans_between(*key))
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
            if tensor.device.type == "cuda" and tensor.device not in self._settled:
                torch.cuda.current_stream(tensor.device).synchronize()
                self._settled.add(tensor.device)
            if self._mirrored.get(index) != (tensor.data_ptr(), tensor._version):
                mirror.copy_(tensor.detach().reshape(-1))  # a frame may bring a part of the tensor only
            self._dirty.add(index)
        return mirror


class GradientSource:
    """Gradients as pieces to send. CUDA gradients go to pinned memory on a side stream, while backward continues."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._pinned: dict[int, torch.Tensor] = {}
        """Of chunks, by index."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pieces(self, chunk: Chunk) -> Pieces:
        """The gradients of a chunk as they are now; zeros where a parameter has none.

        The values are read when the lane sends. Whoever changes a gradient after this call must stage it again.
        """
        parts: list[torch.Tensor] = []
        for span in chunk.spans:
            parameter = self._parameters[span.variable]
            gradient = parameter.grad
            if gradient is None:
                parts.append(torch.zeros(span.num_elements, dtype=parameter.dtype, device=parameter.device))
                continue
            flat = gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)
            flat = flat.detach().reshape(-1) if flat.requires_grad else flat.reshape(-1)
            if span.num_elements < flat.numel():
                flat = flat[span.start : span.start + span.num_elements]
            parts.append(flat)
        if not all([part.is_cpu for part in parts]):
            return self._to_host(parts, chunk.index)

        def ready() -> Sequence[torch.Tensor]:
            are_tiny = chunk.num_elements <= TINY_ELEMENTS * len(parts)
            return [torch.cat(parts)] if are_tiny and len(parts) > 1 else parts

        return ready

    def _to_host(self, parts: Sequence[torch.Tensor], chunk: int) -> Pieces:
        device = next(part.device for part in parts if not part.is_cpu)
        # One copy, as what there is to call and to wait for costs more than to put the parts together there.
        flat = torch.cat([part.to(device) for part in parts]) if len(parts) > 1 else parts[0]
        pinned = self._pinned.get(chunk)
        if pinned is None or pinned.numel() != flat.numel() or pinned.dtype is not flat.dtype:
            pinned = self._pinned[chunk] = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
        side = self._streams.get(flat.device)
        if side is None:
            side = self._streams[flat.device] = torch.cuda.Stream(flat.device)
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            pinned.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        flat.record_stream(side)

        def ready() -> Sequence[torch.Tensor]:
            event.synchronize()
            return [pinned]

        return ready
