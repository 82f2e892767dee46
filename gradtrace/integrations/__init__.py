"""Recording as a callback of a trainer, for those who want it in their code; ``gradtrace record`` needs none of it.

Importing this loads neither torch nor a trainer's package: a callback asks for them when it is made.
"""

from gradtrace.integrations.lightning import LightningCallback
from gradtrace.integrations.transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback"]
