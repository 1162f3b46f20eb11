"""The process group of chips that are this CPU: tensors on "tpu" are copied to the host and meet there through gloo.

It takes the name of torch_tpu's own, tpu_dist, which needs the links of a real slice.
"""

import torch
import torch.distributed as dist


class _Done(torch._C._distributed_c10d.Work):
    def __init__(self, result):
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self._future


class HostGroup(dist.ProcessGroup):
    """The collectives that DDP, FSDP2 and Muon call."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "tpu_dist"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _changed(self, tensors, call):
        """In place, by the group's function on copies."""
        host = [tensor.detach().cpu() for tensor in tensors]
        call(host).wait()
        return self._copied(tensors, host)

    def _copied(self, tensors, host):
        for tensor, copy in zip(tensors, host, strict=True):
            tensor.detach().copy_(copy)
        return _Done(tensors)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        average = opts.reduceOp == dist.ReduceOp.AVG  # which gloo does not know
        if average:
            opts.reduceOp = dist.ReduceOp.SUM

        def call(host):
            work = self._gloo.allreduce(host, opts)
            if average:
                work.wait()
                for tensor in host:
                    tensor.div_(self.size())
            return work

        return self._changed(tensors, call)

    def broadcast(self, tensors, opts=None):
        return self._changed(tensors, lambda host: self._gloo.broadcast(host, opts or dist.BroadcastOptions()))

    def allgather(self, outputs, inputs, opts=None):
        host = [[tensor.detach().cpu() for tensor in each] for each in outputs]
        self._gloo.allgather(host, [tensor.detach().cpu() for tensor in inputs]).wait()
        for tensors, copies in zip(outputs, host, strict=True):
            self._copied(tensors, copies)
        return _Done(outputs)

    def all_gather_single(self, output, input, opts=None):
        parts = list(torch.empty(output.shape, dtype=output.dtype).view(self.size(), -1).unbind())
        self._gloo.allgather([parts], [input.detach().cpu().reshape(-1).contiguous()]).wait()
        return self._copied([output], [torch.cat(parts).view(output.shape)])

    def reduce_scatter_single(self, output, input, opts=None):
        whole = input.detach().cpu().contiguous()
        self._gloo.allreduce([whole]).wait()
        own = whole.view(self.size(), -1)[self.rank()].view(output.shape)
        return self._copied([output], [own / self.size() if opts and opts.reduceOp == dist.ReduceOp.AVG else own])

    # As functional collectives call them, those of DTensor.

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _Done(outputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _Done(outputs)

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, dist.AllreduceOptions())

    def barrier(self, opts=None):
        self._gloo.barrier().wait()
        return _Done([])


dist.Backend.register_backend(
    "tpu_dist", lambda store, rank, size, timeout: HostGroup(store, rank, size, timeout), devices=["tpu"]
)
