"""Gradients of kernels that have none of their own: erasers are trained over cached entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def gradient_of(definition: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Gives a function of the same arguments the gradient of its definition, computed anew."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        differentiable = jax.custom_vjp(function)

        def forward(*arguments: Any) -> tuple[Any, Any]:
            return function(*arguments), arguments

        def backward(arguments: Any, cotangents: Any) -> Any:
            return jax.vjp(definition, *arguments)[1](cotangents)

        differentiable.defvjp(forward, backward)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return differentiable(*arguments)

        return call

    return decorate
