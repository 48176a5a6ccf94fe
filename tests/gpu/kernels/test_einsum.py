from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.kernels.einsum import parse

EQUATIONS = (
    "ij->ji",
    "ij->",
    "ij->i",
    "ii->i",
    "ii",
    "...ii->...i",
    "iij->j",
    "ijk->kij",
    "ij,jk->ik",
    "ij,jk",
    "bij,bjk->bik",
    "bhid,bhjd->bhij",
    "bhij,bhjd->bihd",
    "i,i->",
    "i,j->ij",
    "ij,ij->ij",
    "ij,kl->ijkl",
    "ij,j->i",
    "...ij,...jk->...ik",
    "bid,d->bi",
    "ijk,jil->kl",
    "bnd,bde->bne",
    "ij,jk,kl->il",
    "i,i,i->i",
    "ij,kj,k->i",
    "abc,cd,de,ea->b",
)
SIZES = dict(zip("abcdehijklmnz", (2, 3, 4, 5, 3, 2, 4, 5, 6, 3, 2, 7, 1), strict=True))


def shape(term, dots):
    letters = term.replace("...", dots)
    return tuple(SIZES[c] for c in letters)


@pytest.mark.parametrize("known", [False, True])
def test_equations(cases, rng, variant, known):
    for equation in EQUATIONS:
        terms = equation.split("->")[0].split(",")
        arrays = [rng.standard_normal(shape(t, "mb"), np.float32) for t in terms]
        want = np.einsum(equation, *(a.astype(np.float64) for a in arrays))
        cases.add(
            "Einsum",
            *arrays,
            equation=equation,
            want=want,
            tol=1e-5,
            known=(len(arrays) - 1,) * (known and len(arrays) > 1),
        )
    cases.check()


def test_sizes_of_one_and_none(cases, rng, variant):
    for equation, *shapes in (
        ("ij,jk->ik", (1, 3), (3, 1)),
        ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)),
        ("ij,jk->ik", (0, 3), (3, 2)),
        ("ij,jk->ik", (2, 0), (0, 3)),
        (",ij->ij", (), (2, 3)),
        ("bqd,bkd->bqk", (1, 4, 8), (1, 1, 8)),
        ("ij->ij", (1, 1)),
    ):
        arrays = [rng.standard_normal(s, np.float32) for s in shapes]
        cases.add("Einsum", *arrays, equation=equation, want=np.einsum(equation, *arrays), tol=1e-5)
    cases.add(
        "Einsum", rng.integers(-5, 5, (3, 4), np.int32), rng.integers(-5, 5, (4, 2), np.int32), equation="ij,jk->ik"
    )
    cases.check()


def test_what_an_equation_means():
    assert parse("ij, jk", [2, 2]) == (["ij", "jk"], "ik")
    assert parse("b...,...b->...", [3, 2]) == (["b10", "0b"], "10")
    for equation, ranks in (("ij->k", [2]), ("ij", [3]), ("i,j->ij", [1]), ("ij->ii", [2]), ("i1->i", [2])):
        assert parse(equation, ranks) is None


def test_an_equation_that_does_not_fit_is_refused_by_name(open_model, parse):
    text = 'g (float[2,3] x, float[2,3] y) => (float[a,b] z) { [sum] z = Einsum<equation = "ij,jk->ik">(x, y) }'
    with pytest.raises(InvalidModel, match=r"'sum'.*Einsum.*dimension 'j'"):
        open_model(parse(text)).run({"x": np.zeros((2, 3), np.float32), "y": np.zeros((2, 3), np.float32)})
