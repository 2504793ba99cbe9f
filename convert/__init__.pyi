from .base.errors import CheckpointError as CheckpointError
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import checked as checked
from .checkpoint import convert_checkpoint as convert_checkpoint
from .opened import Opened as Opened
from .opened import open_local as open_local
from .tensors.checkpoint_files import CheckpointFiles as CheckpointFiles
