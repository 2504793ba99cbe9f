#!/usr/bin/env bash
# JAX: a function with its own forward rule (jax.custom_jvp), whose rule is jax.jvp of code that
# contains a jax.custom_vjp, has gradients by all arguments, and by some of them only in jax.jit.
#
# Expected: jax.grad(f) and jax.jit(jax.grad(f)) either both work or both raise. Seen with jax
# 0.10.2 and 0.12.0.1: if the argument of the custom_vjp function is not differentiated,
# jax.jit(jax.grad(f)) returns the gradient, jax.grad(f) and jax.grad(jax.jit(f)) raise
#   TypeError: can't apply forward-mode autodiff (jvp) to a custom_vjp function.
# although nobody asked for forward mode. By all arguments, and without the custom_jvp, it works
# without jit, too. A test that differentiates by everything, or inside jit, does not notice; a
# user who freezes the first layers does. So a custom_jvp wants code without a custom_vjp
# (a custom_jvp in its place serves both modes).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$work/frozen.py" <<'PY'
import jax


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, slope: (2 * slope,))


def product(weight, x):
    return weight * double(x)


whole = jax.custom_jvp(product)
whole.defjvp(lambda primals, tangents: jax.jvp(product, primals, tangents))


def outcome(gradient):
    try:
        return str(gradient(3.0, 5.0))
    except TypeError as error:
        return "forward mode" if "forward-mode" in str(error) else f"other: {error}"


print("in jit", outcome(jax.jit(jax.grad(whole))))
print("alone", outcome(jax.grad(whole)))
print("of jit", outcome(jax.grad(jax.jit(whole))))
print("without custom_jvp", outcome(jax.grad(product)))
print("by both", *map(float, jax.grad(whole, (0, 1))(3.0, 5.0)))
PY
found=$(JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/frozen.py" 2> /dev/null)
echo "jax 0.10.2"
echo "$found"
[[ $found == "in jit 10.0
alone forward mode
of jit forward mode
without custom_jvp 10.0
by both 10.0 6.0" ]]
