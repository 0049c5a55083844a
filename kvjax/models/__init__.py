"""Decoders: architecture, weights, tokenizer.

Checkpoint readers are imported on use; they need packages that decoding does not.
"""

# Configs.
from kvjax.models.config import ModelConfig as ModelConfig
from kvjax.models.config import RopeConfig as RopeConfig

# Modules.
from kvjax.models.decoder import NO_WINDOW as NO_WINDOW
from kvjax.models.decoder import Decoder as Decoder
from kvjax.models.decoder import DecoderLayer as DecoderLayer
from kvjax.models.decoder import Projected as Projected

# Rotary embedding.
from kvjax.models.rope import apply_rope as apply_rope
from kvjax.models.rope import rope_frequencies as rope_frequencies
from kvjax.models.rope import rotation as rotation

# Device meshes.
from kvjax.models.sharding import ShardingRules as ShardingRules
from kvjax.models.sharding import make_mesh as make_mesh
