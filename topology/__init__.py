"""The emulated network: what it is (``spec``, ``lanes``) and making Linux be it (``netns``).

Knows nothing of language models and imports nothing of ``emulator``; it is given emulated rates.
"""
