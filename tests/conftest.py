from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("trionnx", deadline=None, max_examples=100)
hypothesis.settings.load_profile("trionnx")
