"""The reports of ``check_target`` and ``check_drafter``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of one property.

    Attributes:
      name: the property.
      passed: whether the target or drafter has it.
      found: what is wrong; empty if the check passed.
    """

    name: str
    passed: bool
    found: str = ""


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """The result of ``check_target`` or ``check_drafter``. It is true if every check passed.

    Attributes:
      subject: the name of the checked target or drafter.
      checks: one ``Check`` for each property.
    """

    subject: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'all checks passed' if self else 'WRONG'}"]
        for check in self.checks:
            mark = "ok   " if check.passed else "WRONG"
            lines.append(f"  {mark} {check.name}" + (f": {check.found}" if check.found else ""))
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raises ``AssertionError`` with the whole report unless every check passed."""
        if not self:
            raise AssertionError(str(self))


def run_check(name: str, run) -> Check:
    """Runs one check.

    Args:
      name: the property.
      run: a function that returns a text about what is wrong, or an empty text or None. An
        exception means that the check failed.
    """
    try:
        found = run() or ""
    except Exception as error:  # code of a user may raise any exception
        found = f"{type(error).__name__}: {error}"
    return Check(name, not found, found)
