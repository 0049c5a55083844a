"""Taking spans out of a processed context: KVEraser and its baselines through one interface."""

from kvjax.erasing.method import Method
from kvjax.erasing.methods import METHODS, erasing_method
from kvjax.erasing.spans import Extent
from kvjax.erasing.given import Spans
from kvjax.erasing.door import apply, erase

__all__ = ["METHODS", "Extent", "Method", "Spans", "apply", "erase", "erasing_method"]
