"""The distribution isograd-verify: src/ is installed; tests/ and survey/ are run from the repository."""
