"""A process group for chips simulated on this CPU: it copies tensors on "tpu" to the host and uses gloo.

It replaces torch_tpu's, called tpu_dist, which needs the links of a real slice.
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

    def _run(self, collective, tensors):
        """Runs a collective that works in place on copies of the tensors, and copies the results back."""
        copies = [tensor.detach().cpu() for tensor in tensors]
        collective(copies).wait()
        return self._copy_back(copies, tensors)

    def _copy_back(self, copies, tensors):
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
        return _Done(tensors)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        average = opts.reduceOp == dist.ReduceOp.AVG  # gloo does not have it
        if average:
            opts.reduceOp = dist.ReduceOp.SUM

        def allreduce(copies):
            work = self._gloo.allreduce(copies, opts)
            if average:
                work.wait()
                for copy in copies:
                    copy.div_(self.size())
            return work

        return self._run(allreduce, tensors)

    def broadcast(self, tensors, opts=None):
        return self._run(lambda copies: self._gloo.broadcast(copies, opts or dist.BroadcastOptions()), tensors)

    def allgather(self, outputs, inputs, opts=None):
        output_copies = [[tensor.detach().cpu() for tensor in tensors] for tensors in outputs]
        self._gloo.allgather(output_copies, [tensor.detach().cpu() for tensor in inputs]).wait()
        for copies, tensors in zip(output_copies, outputs, strict=True):
            self._copy_back(copies, tensors)
        return _Done(outputs)

    def all_gather_single(self, output, input, opts=None):
        parts = list(torch.empty(output.shape, dtype=output.dtype).view(self.size(), -1).unbind())
        self._gloo.allgather([parts], [input.detach().cpu().reshape(-1).contiguous()]).wait()
        return self._copy_back([torch.cat(parts).view(output.shape)], [output])

    def reduce_scatter_single(self, output, input, opts=None):
        total = input.detach().cpu().contiguous()
        self._gloo.allreduce([total]).wait()
        shard = total.view(self.size(), -1)[self.rank()].view(output.shape)
        if opts and opts.reduceOp == dist.ReduceOp.AVG:
            shard = shard / self.size()
        return self._copy_back([shard], [output])

    # Called by the functional collectives of DTensor.

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
