"""From a model's files to modules that are ready to run: followed and proven, or recalled from a proof."""
