"""Many runs from one start: sweep, bisection, batch size, budget, engines."""
