"""Models, draft heads and n-gram tables on disk: find, load, save and describe them."""
