"""What a door for another loop takes from inside, beside the public names: all of it, by name.

A door (`gemini/integrations/`, or a package of its own) imports from the rooms that training needs
only what `gemini` and `gemini.optim` publish, and these. Optional rooms (`gemini.checkpoint`,
`gemini.parallel`, `gemini.samplers`, `gemini.plan`, `gemini.layouts` ...) it imports as they are.

optimizers
    TieredOptimizer     base of all optimizers; `bind_to(model.parameters())` lets one update shards
    Scaling             loss scale of gradients in `p.grad`, for an optimizer of torch's
    asked_norm          checks the arguments of a `clip_grad_norm_`
    show_steps          lets schedulers that were made before see the steps of a changed optimizer
modules
    fill_empty          gives values to the meta parameters of a module that nobody wraps
    full_parameters     whole values of a wrapped module, on rank 0 or on every rank
    map_tensors         changes the tensors inside inputs and outputs
options
    Placement           type of a placement policy
    parse_placement     policy by its name
    Trace               type of what `gemini.trace` returns
    ChunkConfiguration  type of what `gemini.search_chunk_configuration` returns
    as_precision        "bf16", "fp16" or "fp32", by any name of the dtype
wrong arguments, as a TypeError that says which one was meant
    by_name             of a class or a function
    passes_on           of a function whose `**options` go to another one
    check_passed_on     the same, where the other one is known late
    takes_fields        of a function that takes frozen values, or their fields
    nearest             the name that was probably meant
processes
    rank                0 without a process group
    world_size          1 without a process group
    this_device         where this process computes
    rest_at_exit        lets gloo's threads end before Python does: of who makes a process group
    Ticket              type of what an asynchronous save returns
"""

from gemini.arguments import by_name, check_passed_on, nearest, passes_on
from gemini.chunk.sizing.search import ChunkConfiguration
from gemini.comm.connect import rank, this_device, world_size
from gemini.comm.leaving import rest_at_exit
from gemini.memtracer.trace import Trace
from gemini.optim.base import TieredOptimizer
from gemini.optim.binding import show_steps
from gemini.optim.rules.clipping import asked_norm
from gemini.optim.rules.plain_scale import Scaling
from gemini.options import takes_fields
from gemini.placement.policy import Placement, parse_placement
from gemini.runtime.inspect.full_parameters import full_parameters
from gemini.runtime.wrap.materialise import fill_empty
from gemini.runtime.wrap.precision import as_precision
from gemini.tickets import Ticket
from gemini.trees import map_tensors

__all__ = [
    "ChunkConfiguration",
    "Placement",
    "Scaling",
    "Ticket",
    "TieredOptimizer",
    "Trace",
    "as_precision",
    "asked_norm",
    "by_name",
    "check_passed_on",
    "fill_empty",
    "full_parameters",
    "map_tensors",
    "nearest",
    "parse_placement",
    "passes_on",
    "rank",
    "rest_at_exit",
    "show_steps",
    "takes_fields",
    "this_device",
    "world_size",
]
