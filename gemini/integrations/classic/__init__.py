"""Names of Colossal-AI: wrappers by ZeRO stage, ShardedModelV2, bucketers, handlers, tools."""

from gemini import CPUAdam as CPUAdam
from gemini import FusedAdam as FusedAdam
from gemini import GeminiAdamOptimizer as GeminiAdamOptimizer
from gemini import GeminiOptimizer as GeminiOptimizer
from gemini import HybridAdam as HybridAdam
from gemini.optim import HybridLamb

from . import hooks as hooks
from . import layers as layers
from . import moe as moe
from . import tensors as tensors
from .bucketer import ReduceScatterBucketer as ReduceScatterBucketer
from .contexts import BaseShardStrategy as BaseShardStrategy
from .contexts import BucketTensorShardStrategy as BucketTensorShardStrategy
from .contexts import ColoInitContext as ColoInitContext
from .contexts import LazyInitContext as LazyInitContext
from .contexts import TensorShardStrategy as TensorShardStrategy
from .contexts import ZeroInitContext as ZeroInitContext
from .engine import convert_to_amp as convert_to_amp
from .engine import initialize as initialize
from .handlers import GRADIENT_HANDLER as GRADIENT_HANDLER
from .handlers import LAYERS as LAYERS
from .handlers import MODELS as MODELS
from .handlers import BaseGradientHandler as BaseGradientHandler
from .handlers import DataParallelGradientHandler as DataParallelGradientHandler
from .pipeline import PipelinableContext as PipelinableContext
from .pipeline import build_pipeline_model as build_pipeline_model
from .pipeline import partition_balanced as partition_balanced
from .pipeline import partition_uniform as partition_uniform
from .schedules import InterleavedPipelineSchedule as InterleavedPipelineSchedule
from .schedules import PipelineSchedule as PipelineSchedule
from .sharded_v2 import ShardedModelV2 as ShardedModelV2
from .sharded_v2 import ShardedOptimizerV2 as ShardedOptimizerV2
from .sharded_v2 import col_model_deepcopy as col_model_deepcopy
from .tools import MultiTimer as MultiTimer
from .tools import disable_existing_loggers as disable_existing_loggers
from .tools import get_dataloader as get_dataloader
from .tools import print_rank_0 as print_rank_0
from .tools import spawn as spawn
from .trainer import Trainer as Trainer
from .wrappers import ChunkManager as ChunkManager
from .wrappers import FusedSGD as FusedSGD
from .wrappers import GeminiDDP as GeminiDDP
from .wrappers import GeminiManager as GeminiManager
from .wrappers import LowLevelZeroOptimizer as LowLevelZeroOptimizer
from .wrappers import ZeroDDP as ZeroDDP
from .wrappers import get_current_device as get_current_device
from .wrappers import get_static_torch_model as get_static_torch_model
from .wrappers import init_chunk_manager as init_chunk_manager
from .wrappers import load_checkpoint as load_checkpoint
from .wrappers import save_checkpoint as save_checkpoint
from .wrappers import zero_model_wrapper as zero_model_wrapper
from .wrappers import zero_optim_wrapper as zero_optim_wrapper

Lamb = HybridLamb
