"""Training without writing a loop: Model, callbacks, checkpoints, export."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, ["callbacks"])
