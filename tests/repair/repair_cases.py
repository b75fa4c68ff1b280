"""Bodies with what `derive` answers: shared by the golden, numeric and speed tests.

Names of one letter before m are opaque parts that vary; r, l, v, m are frames unless a case says otherwise; s and n are
values that do not vary; p and q are predicates.
"""

from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder, read, substitute
from pallasfuse.repair import Frame, parse_expr

J = Axis("j", 12)
FIXED = ("s", "n")


@dataclass(frozen=True)
class Accepted:
    text: str
    reducer: str
    frames: tuple[Frame, ...]
    rank: int
    matrix: str
    nonzero: tuple[str, ...] = ()
    conditions: int = 0
    """Conditions other than those of `nonzero`."""

    def __str__(self) -> str:
        return f"{self.reducer} {self.text}"


@dataclass(frozen=True)
class Refused:
    text: str
    reducer: str
    frames: tuple[Frame, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.reducer} {self.text}"


def over_j(text: str, frames: tuple[Frame, ...]) -> Expr:
    """`text` with every name along the axis j, but for frames and FIXED."""
    body = parse_expr(text)
    fixed = {f.name for f in frames} | set(FIXED)
    varying: dict[Expr, Expr] = {
        n: read(n.tensor, (J,), n.dtype) for n in postorder(body) if isinstance(n, Read) and n.tensor not in fixed
    }
    return substitute(body, varying)


R, L, V = Frame("r"), Frame("l", "positive"), Frame("v", "positive")
PR, NR, M = Frame("r", "positive"), Frame("r", "negative"), Frame("m")
D = "r.old - r"

ACCEPTED = (
    # one accumulator
    Accepted("exp(c-r)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(c-r)*w", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(c-r)*(w+b)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(s*(c-r))", "sum", (R,), 1, "[[exp(s * (r.old - r))]]"),
    Accepted("exp(s*c-s*r)", "sum", (R,), 1, "[[exp(s * (r.old - r))]]"),
    Accepted("exp(0.125*(c-r))*w", "sum", (R,), 1, "[[exp(0.125 * (r.old - r))]]"),
    Accepted("exp((c-r)*0.08838834764831845)", "sum", (R,), 1, "[[exp(0.08838834764831845 * (r.old - r))]]"),
    Accepted("exp((c-r)/s)", "sum", (R,), 1, "[[exp((r.old - r) / s)]]"),
    Accepted("exp(c-r+1)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(-abs(c)+r)", "sum", (R,), 1, "[[exp(r - r.old)]]"),
    Accepted("exp(c)/exp(r)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("2**(c-r)", "sum", (R,), 1, "[[exp2(r.old - r)]]"),
    Accepted("pow(10.0, c-r)", "sum", (R,), 1, "[[10 ** (r.old - r)]]"),
    Accepted("exp2(c-r)*w", "sum", (R,), 1, "[[exp2(r.old - r)]]"),
    Accepted("pow(s*s+1, c-r)", "sum", (R,), 1, "[[exp(log(s * s + 1) * (r.old - r))]]"),
    Accepted("c*w*rsqrt(r)", "sum", (R,), 1, "[[sqrt(r.old / r)]]"),
    Accepted("c*w*rsqrt(r/n+1e-6)", "sum", (Frame("r", "nonnegative"),), 1,
             "[[sqrt((r.old / n + 1e-06) / (r / n + 1e-06))]]"),
    Accepted("c/sqrt(v)", "sum", (V,), 1, "[[sqrt(v.old / v)]]"),
    Accepted("c/r**3", "sum", (R,), 1, "[[(r.old / r) ** 3]]"),
    Accepted("c*r**0.75", "sum", (PR,), 1, "[[(r / r.old) ** 0.75]]"),
    Accepted("c*cbrt(v)", "sum", (V,), 1, "[[cbrt(v) / cbrt(v.old)]]"),
    Accepted("(c+w)*r", "sum", (R,), 1, "[[r / r.old]]", ("r",)),
    Accepted("(c+w)*r", "sum", (PR,), 1, "[[r / r.old]]"),
    Accepted("c*r+w*r", "sum", (NR,), 1, "[[r / r.old]]"),
    Accepted("c*(1+r)", "sum", (R,), 1, "[[(r + 1) / (r.old + 1)]]", ("r + 1",)),
    Accepted("c*(1+r)", "sum", (PR,), 1, "[[(r + 1) / (r.old + 1)]]"),
    Accepted("tanh(c)*r", "sum", (PR,), 1, "[[r / r.old]]"),
    Accepted("c*erf(r)", "sum", (PR,), 1, "[[erf(r) / erf(r.old)]]"),
    Accepted("c*cos(r)", "sum", (R,), 1, "[[cos(r) / cos(r.old)]]", ("cos(r)",)),
    Accepted("c*max(r, 0.5)", "sum", (R,), 1, "[[max(r, 0.5) / max(r.old, 0.5)]]"),
    Accepted("exp(c-r)/l*w", "sum", (R, L), 1, "[[l.old / l * exp(r.old - r)]]"),
    Accepted("exp(c-r)*exp(d-l)", "sum", (R, Frame("l")), 1, "[[exp(r.old - r + (l.old - l))]]"),
    Accepted("sqrt(abs(c)*r)", "sum", (PR,), 1, "[[sqrt(r / r.old)]]"),
    Accepted("abs(r)*c", "sum", (NR,), 1, "[[r / r.old]]"),
    Accepted("expm1(c-r)+1", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(c-log(l))", "sum", (L,), 1, "[[exp(log(l.old / l))]]"),
    Accepted("c-r+r", "sum", (R,), 1, "[[1]]"),
    Accepted("c*w", "sum", (R,), 1, "[[1]]"),
    # masks
    Accepted("select(p, exp(c-r), 0)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("select(p, 0, exp(c-r)*w)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(select(p, c, -inf)-r)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(select(p, c-r, -inf))*w", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("exp(select(p, c, d)-r)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("select(p, exp(c-r), exp(d-r))", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("select(p, select(q, exp(c-r), 0), 0)", "sum", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("select(p, square(c-r), 0)", "sum", (R,), 3,
             "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]"),
    Accepted("select(p, c/r, d/r)", "sum", (PR,), 1, "[[r.old / r]]"),
    Accepted("square(select(p, c-r, 0)) - select(p, (c-2*r)*c, 0)", "sum", (PR,), 1, "[[square(r / r.old)]]"),
    # more than one accumulator
    Accepted("c-r", "sum", (R,), 2, "[[1, r.old - r], [0, 1]]"),
    Accepted("(c-r)*w", "sum", (R,), 2, "[[1, r.old - r], [0, 1]]"),
    Accepted("(c-r)**2", "sum", (R,), 3, "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]"),
    Accepted("square(c-r)", "sum", (R,), 3, "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]"),
    Accepted("(c-r)*(c-r)", "sum", (R,), 3, "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]"),
    Accepted("(c-r)**3", "sum", (R,), 4,
             "[[1, 3 * (r.old - r), 3 * square(r.old - r), (r.old - r) ** 3],"
             " [0, 1, 2 * (r.old - r), square(r.old - r)], [0, 0, 1, r.old - r], [0, 0, 0, 1]]"),
    Accepted("integer_pow(c-r, 4)", "sum", (R,), 5,
             "[[1, 4 * (r.old - r), 6 * square(r.old - r), 4 * (r.old - r) ** 3, (r.old - r) ** 4],"
             " [0, 1, 3 * (r.old - r), 3 * square(r.old - r), (r.old - r) ** 3],"
             " [0, 0, 1, 2 * (r.old - r), square(r.old - r)], [0, 0, 0, 1, r.old - r], [0, 0, 0, 0, 1]]"),
    Accepted("exp(c-r)*(c-r)", "sum", (R,), 2, "[[exp(r.old - r), (r.old - r) * exp(r.old - r)], [0, exp(r.old - r)]]"),
    Accepted("exp(c-r)*(c-r-log(l))", "sum", (R, L), 2,
             "[[exp(r.old - r), (r.old - r + log(l.old / l)) * exp(r.old - r)], [0, exp(r.old - r)]]"),
    Accepted("exp(c-r)/l*(c-r-log(l))", "sum", (R, L), 2,
             "[[l.old / l * exp(r.old - r), (r.old - r + log(l.old / l)) * exp(r.old - r) / l], [0, exp(r.old - r)]]"),
    Accepted("log(exp(c-r)/l)", "sum", (R, L), 2, "[[1, r.old - r + log(l.old / l)], [0, 1]]", conditions=1),
    Accepted("l*sin(d-m)-log(l)*(1+l)", "sum", (L, M), 3, ""),
    Accepted("select(p, c-r, 0)*select(p, d-r, 1)", "sum", (R,), 3, ""),
    Accepted("square(select(p, c-r, d))", "sum", (R,), 3,
             "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]"),
    Accepted("(c-r)*(d-m)", "sum", (R, M), 4,
             "[[1, r.old - r, m.old - m, (m.old - m) * (r.old - r)], [0, 1, 0, m.old - m], [0, 0, 1, r.old - r],"
             " [0, 0, 0, 1]]"),
    Accepted("(c-r)*rsqrt(v)", "sum", (R, V), 2, "[[sqrt(v.old / v), rsqrt(v) * (r.old - r)], [0, 1]]"),
    Accepted("(c-r)*rsqrt(v+1e-5)*w", "sum", (R, Frame("v", "nonnegative")), 2,
             "[[sqrt((v.old + 1e-05) / (v + 1e-05)), rsqrt(v + 1e-05) * (r.old - r)], [0, 1]]"),
    Accepted("cosh(c-r)", "sum", (R,), 2,
             "[[cosh(r.old - r), sinh(r.old - r)], [sinh(r.old - r), cosh(r.old - r)]]"),
    Accepted("sinh(c-r)", "sum", (R,), 2,
             "[[cosh(r.old - r), sinh(r.old - r)], [sinh(r.old - r), cosh(r.old - r)]]"),
    Accepted("sin(c-r)", "sum", (R,), 2, "[[cos(r.old - r), sin(r.old - r)], [-sin(r.old - r), cos(r.old - r)]]"),
    Accepted("cos(c+r)", "sum", (R,), 2, "[[cos(r.old - r), sin(r.old - r)], [-sin(r.old - r), cos(r.old - r)]]"),
    Accepted("exp(c-r)*(w/l-m)", "sum", (R, L, M), 2,
             "[[l.old / l * exp(r.old - r), (l.old * m.old - l * m) * exp(r.old - r) / l], [0, exp(r.old - r)]]"),
    Accepted("square(c/l)-2*c*m/l", "sum", (L, M), 2, ""),
    Accepted("exp(c-r)*sin(c-r)", "sum", (R,), 2, ""),
    Accepted("cosh(c-r)*(c-r)", "sum", (R,), 4, ""),
    Accepted("square(c-r)*square(d-m)", "sum", (R, M), 9, ""),
    Accepted("c*exp2(r)+d*exp(r)", "sum", (R,), 2, ""),
    Accepted("exp2(c-r)*(c-r)", "sum", (R,), 2,
             "[[exp2(r.old - r), (r.old - r) * exp2(r.old - r)], [0, exp2(r.old - r)]]"),
    Accepted("exp(s*(c-r))*(c-r)", "sum", (R,), 2,
             "[[exp(s * (r.old - r)), (r.old - r) * exp(s * (r.old - r))], [0, exp(s * (r.old - r))]]"),
    # casts
    Accepted("square(float32(float64(c-r)))", "sum", (R,), 3,
             "[[1, 2 * (r.old - r), square(r.old - r)], [0, 1, r.old - r], [0, 0, 1]]", conditions=1),
    Accepted("float16(exp(c-r))*float16(w)", "sum", (R,), 1, "[[exp(r.old - r)]]", conditions=1),
    Accepted("exp(c-float32(float16(r)))", "sum", (R,), 1,
             "[[exp(float32(float16(r.old)) - float32(float16(r)))]]"),
    # other reducers
    Accepted("c-r", "max", (R,), 1, "[[r.old - r]]"),
    Accepted("c-r", "min", (R,), 1, "[[r.old - r]]"),
    Accepted("c+r*r", "max", (R,), 1, ""),
    Accepted("c*r", "max", (PR,), 1, "[[r / r.old]]"),
    Accepted("c*r", "max", (NR,), 1, "[[r / r.old]]"),
    Accepted("c/r", "min", (PR,), 1, "[[r.old / r]]"),
    Accepted("c*r", "min", (Frame("r", "nonnegative"),), 1, "[[r / r.old]]", ("r",)),
    Accepted("exp(c-r)", "max", (R,), 1, "[[exp(r.old - r)]]"),
    Accepted("log(exp(c-r)/l)", "max", (R, L), 1, "[[r.old - r + log(l.old / l)]]", conditions=1),
    Accepted("(c-r)*rsqrt(v)", "max", (R, V), 1, "[[sqrt(v.old / v)]]"),
    Accepted("select(p, c-r, -inf)", "max", (R,), 1, "[[r.old - r]]"),
    Accepted("select(p, c*r, inf)", "min", (PR,), 1, "[[r / r.old]]"),
    Accepted("float16(select(p, c-r, -inf))", "max", (R,), 1, "[[r.old - r]]", conditions=1),
    Accepted("select(p, select(q, c-r, -inf), -inf)", "max", (R,), 1, "[[r.old - r]]"),
    Accepted("select(p, select(q, c*r, 1), 1)", "prod", (PR,), 2, "[[(r / r.old) ** acc.1]]"),
    Accepted("c*r", "prod", (R,), 2, "[[(r / r.old) ** acc.1]]", ("r",)),
    Accepted("c/r", "prod", (R,), 2, "[[(r.old / r) ** acc.1]]"),
    Accepted("exp(c-r)", "prod", (R,), 2, "[[exp((r.old - r) * acc.1)]]"),
    Accepted("select(p, c*r, 1)", "prod", (PR,), 2, "[[(r / r.old) ** acc.1]]"),
    Accepted("pow(exp(c), r)", "prod", (PR,), 1, "[[r / r.old]]"),
    Accepted("pow(abs(c)+1, r)", "prod", (PR,), 1, "[[r / r.old]]"),
    Accepted("c", "prod", (R,), 1, "[[1]]"),
)  # fmt: skip

REFUSED = (
    Refused("round_even(c/r)", "sum", (R,), "round_even(c[j] / r) is not a finite sum of a(r)*b(c) terms"),
    Refused("floor(c-r)", "sum", (R,), "floor has no algebra over its argument"),
    Refused("exp(c/r)", "sum", (R,), "exp(c[j] / r) ties an unfinished value to one that varies"),
    Refused("exp(c*r)*w", "sum", (R,), "is not a finite sum of a(r)*b(c) terms"),
    Refused("exp(s*(c-r))*exp(d*r)", "sum", (R,), "ties an unfinished value"),
    Refused("1/(c+r)", "sum", (R,), "its denominator or base c[j] + r adds an unfinished value"),
    Refused("sqrt(c-r)", "sum", (R,), "c[j] - r adds an unfinished value"),
    Refused("sqrt(c*r)", "sum", (R,), "splits only where the sign of c[j] * r is known"),
    Refused("sqrt(square(r)*abs(c))", "sum", (R,), "sign"),
    Refused("log(c+r)", "sum", (R,), "a logarithm splits over a product, not over a sum"),
    Refused("log(c*r)", "sum", (R,), "the sign of r is not known"),
    Refused("log1p(c*r)", "sum", (R,), "a logarithm splits over a product"),
    Refused("pow(c, r)", "sum", (R,), "only where c[j] is known to be positive"),
    Refused("pow(abs(c)+1, r)", "sum", (R,), "ties an unfinished value to one that varies"),
    Refused("tanh(c-r)", "sum", (R,), "tanh has no algebra over its argument"),
    Refused("logistic(c*r)", "sum", (R,), "logistic has no algebra"),
    Refused("erf(c-r)", "sum", (R,), "erf has no algebra"),
    Refused("abs(c-r)", "sum", (R,), "the sign of c[j] - r is not known"),
    Refused("max(c, r)", "sum", (R,), "max has no algebra over its argument"),
    Refused("select(c > r, c, r)", "sum", (R,), "c[j] > r depends on a value that is not finished yet"),
    Refused("int32(c-r)", "sum", (R,), "a cast to int32 has no algebra"),
    Refused("float32(int32(c-r))", "sum", (R,), "a cast to int32 has no algebra"),
    Refused("c*r", "max", (R,), "the sign of r is not known"),
    Refused("(c-r)**2", "max", (R,), "the only one that max commutes with"),
    Refused("c*r+d/r", "max", (PR,), "the only one that max commutes with"),
    Refused("select(p, c-r, -1e30)", "max", (R,), "the only one that max commutes with"),
    Refused("select(p, c-r, inf)", "max", (R,), "under max"),
    Refused("c-r", "prod", (R,), "the only one that prod splits over"),
    Refused("exp(c*r-r)", "prod", (PR,), "the only forms that prod splits over"),
    Refused("select(p, c*r, 2)", "prod", (PR,), "a mask whose other branch is not 1"),
    Refused("exp(select(p, c-r, inf))", "sum", (R,), "is infinite or NaN where a predicate is false"),
    Refused("integer_pow(c-r, 12)", "sum", (R,), "more than 12 accumulators"),
    Refused("sin(d-r)*exp2(d-r)*(d-r)", "sum", (R,), "needs an accumulator whose terms take"),
    Refused("pow(-2.0, c-r)", "sum", (R,), "raises a number that is not positive"),
)  # fmt: skip
