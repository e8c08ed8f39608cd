"""A small raw client of the ParameterServer service: generated stub for control, bytes for the lane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import torch
import torch._dynamo  # the first Adam of a process loads it: 5 s of CPU, which no call is to wait for

from stratagem.rpc.channels import connect
from stratagem.rpc.codec import Frame, decode_frame, encode_frame
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2, ps_pb2_grpc

TIMEOUT_S = 40.0


class RawClient:
    """One process life of a worker on the wire."""

    def __init__(self, address: str, task: str = "worker:0", incarnation: int = 1) -> None:
        self.task, self.incarnation = task, incarnation
        self.sequence = 0
        self.control, self.data = connect(address), connect(address)
        self.stub: Any = ps_pb2_grpc.ParameterServerStub(self.control)
        hello = ps_pb2.HelloRequest(sender=self.sender(0), next_sequence=1)
        self.hello: ps_pb2.HelloReply = self.stub.Hello(hello, timeout=TIMEOUT_S)
        self.open_lane()

    def open_lane(self) -> None:
        """Opens the Transfer stream; its replies and its end go into queues."""
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[Frame | grpc.RpcError] = queue.SimpleQueue()
        method = self.data.stream_stream("/stratagem.ParameterServer/Transfer", None, None)
        metadata = (("stratagem-task", self.task), ("stratagem-incarnation", str(self.incarnation)))
        self.call: Any = method(self._outgoing(self.outbox), metadata=metadata)
        self.reader = threading.Thread(target=self._read, args=(self.call, self.inbox), daemon=True)
        self.reader.start()

    def sender(self, sequence: int | None = None) -> common_pb2.Sender:
        """This sender with the next number, or a given one."""
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        return common_pb2.Sender(task=self.task, incarnation=self.incarnation, sequence=sequence)

    def stage(
        self, transfer: int, flat: torch.Tensor, kind: int = frame_pb2.GRADIENT, pieces: int = 3, group: int = 1
    ) -> Any:
        """Sends a flat tensor in pieces."""
        step = -(-flat.numel() // pieces)
        offsets = range(0, flat.numel(), step)
        for offset in offsets:
            self.outbox.put(encode_frame(kind, transfer, group, offset, flat[offset : offset + step]))
        return ps_pb2.TransferRef(transfer=transfer, num_frames=len(offsets))

    def create(self, values: torch.Tensor, optimizer: str = "SGD") -> ps_pb2.CreateVariablesReply:
        """One group of one variable; assigns ``values`` when asked to."""
        shard = ps_pb2.ShardSpec(variable="w", shape=[values.numel()], num_rows=values.numel())
        group = ps_pb2.GroupSpec(group=1, optimizer=optimizer, dtype=frame_pb2.FLOAT32, shards=[shard])
        request = ps_pb2.CreateVariablesRequest(sender=self.sender(), groups=[group], can_initialize=True)
        reply: ps_pb2.CreateVariablesReply = self.stub.CreateVariables(request, timeout=TIMEOUT_S)
        if reply.initialize:
            ref = self.stage(1, values, frame_pb2.VALUES)
            assign = ps_pb2.AssignValuesRequest(sender=self.sender(), values=ref, groups=reply.initialize)
            self.stub.AssignValues(assign, timeout=TIMEOUT_S)
        return reply

    def commit_request(self, transfer: int, ref: Any, index: int, **fields: Any) -> ps_pb2.CommitUpdateRequest:
        """A commit of one unit."""
        group = ps_pb2.GroupCommit(group=1)
        group.hyper_parameters.add().update({"lr": 0.5})
        update = common_pb2.Update(units=[common_pb2.Unit(dataset=1, epoch=0, index=index)])
        return ps_pb2.CommitUpdateRequest(
            sender=self.sender(),
            update=update,
            gradients=ref,
            groups=[group],
            action=ps_pb2.APPLY,
            scale=1.0,
            reply_transfer=transfer + 1,
            num_servers=1,
            **fields,
        )

    def pull(self, transfer: int, have: ps_pb2.Version | None = None) -> ps_pb2.PullWeightsReply:
        """Pulls the group."""
        want = ps_pb2.PullWeightsRequest.Want(group=1, have=have)
        request = ps_pb2.PullWeightsRequest(sender=self.sender(0), groups=[want], reply_transfer=transfer)
        reply: ps_pb2.PullWeightsReply = self.stub.PullWeights(request, timeout=TIMEOUT_S)
        return reply

    def receive(self, num_elements: int, num_frames: int) -> torch.Tensor:
        """The flat tensor that the next frames bring."""
        flat = torch.full((num_elements,), torch.nan)
        for _ in range(num_frames):
            frame = self.inbox.get(timeout=TIMEOUT_S)
            assert isinstance(frame, Frame)
            flat[frame.offset : frame.offset + frame.tensor.numel()] = frame.tensor
        return flat

    def lane_end(self) -> grpc.RpcError:
        """What ended the lane."""
        item = self.inbox.get(timeout=TIMEOUT_S)
        assert isinstance(item, grpc.RpcError)
        return item

    def close(self) -> None:
        """Hangs up."""
        self.outbox.put(None)
        self.call.cancel()
        self.reader.join(TIMEOUT_S)
        self.control.close()
        self.data.close()

    @staticmethod
    def _outgoing(outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
        while (message := outbox.get()) is not None:
            yield message

    def _read(self, call: Any, inbox: queue.SimpleQueue[Frame | grpc.RpcError]) -> None:
        try:
            for message in call:
                inbox.put(decode_frame(message))
        except grpc.RpcError as error:
            inbox.put(error)
        self.outbox.put(None)
