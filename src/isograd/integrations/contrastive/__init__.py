"""The names people know from OpenCLIP and sentence-transformers, in front of isograd's gradient."""
