"""The names people know from GradCache, OpenCLIP and sentence-transformers, in front of isograd's gradient."""
