"""What the commands share: the binary, files of models and tensors, references, tolerances, options, pages."""
