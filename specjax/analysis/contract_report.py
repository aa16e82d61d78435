"""The reports of the checks of your own target or drafter."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Check:
    """One property: its ``name``, whether it ``passed``, and what was found where it did not."""

    name: str
    passed: bool
    found: str = ""


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """The result of ``check_target`` or ``check_drafter``. It is true if every check passed.

    Attributes:
      subject: what was checked.
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
    """Runs one check: ``run()`` returns what is wrong or nothing, and an exception is a finding."""
    try:
        found = run() or ""
    except Exception as error:  # whatever a user's own code raises is a finding
        found = f"{type(error).__name__}: {error}"
    return Check(name, not found, found)
