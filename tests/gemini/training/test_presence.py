"""What ranks tell each other behind a backward, over a group whose tensors are on a GPU: on
stand-ins for both."""

import torch
from torch import Tensor, nn

from gemini import GeminiDDP
from gemini.comm.communicator import Communicator
from tests.support.alike import one_of_many

GPU = torch.device("cuda", 0)


def test_a_backward_tells_of_its_gradients_by_a_pinned_copy_that_the_host_does_not_wait_for(
    monkeypatch,
):
    pinned, copies = [], []
    make, move = torch.tensor, Tensor.to

    def tensor(*args, pin_memory=False, **kwargs):
        made = make(*args, **kwargs)
        if pin_memory:
            pinned.append(made)
        return made

    def to(self, *args, non_blocking=False, **kwargs):
        if GPU not in args:
            return move(self, *args, non_blocking=non_blocking, **kwargs)
        copies.append((any(self is one for one in pinned), non_blocking))
        return self

    with one_of_many(2):
        model = GeminiDDP(nn.Linear(4, 4, bias=False))
        loss = model(torch.ones(1, 4)).sum()
        monkeypatch.setattr(Communicator, "device", GPU)
        monkeypatch.setattr(torch, "tensor", tensor)
        monkeypatch.setattr(Tensor, "to", to)
        loss.backward()
    assert copies == [(True, True)]
