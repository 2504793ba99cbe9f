"""Prompts on which the bundled drafters are tested."""

PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th number."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "It was a dark night, and",
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\n",
)
