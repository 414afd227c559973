"""Commands that compare ckpt-opt with another implementation, or a plan with what it promises."""
