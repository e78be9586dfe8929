"""Our part of torch.distributed.checkpoint: readers, writers, ranks."""
