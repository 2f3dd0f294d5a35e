"""Runs all checks at once; a check that raises is a finding, and the others go on."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from nightjar.jobs.errors import JobError
from nightjar.pipeline.front.doctor.fights import check_settings
from nightjar.pipeline.front.doctor.findings import Check, Finding, fault
from nightjar.pipeline.front.doctor.machine import (
    check_compute,
    check_disk,
    check_models,
    check_ports,
)
from nightjar.pipeline.front.doctor.services import check_broker, check_database
from nightjar.pipeline.settings import Settings
from nightjar.visible import visible

CHECKS: Mapping[str, Check] = {
    "settings": check_settings,
    "database": check_database,
    "broker": check_broker,
    "model": check_models,
    "kernels": check_compute,
    "disk": check_disk,
    "ports": check_ports,
}


def examine(settings: Settings) -> list[Finding]:
    """Return what every check finds, in the order of CHECKS."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        running = [pool.submit(_run, name, check, settings) for name, check in CHECKS.items()]
        return [finding for one in running for finding in one.result()]


def _run(name: str, check: Check, settings: Settings) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check(settings))
    except JobError as error:
        found.append(fault(name, visible(error), "correct what it names, then run this again"))
    except Exception as error:  # noqa: BLE001 - shown; the other checks go on
        told = f"the check itself failed: {type(error).__name__}: {visible(error)}"
        found.append(fault(name, told, "report this as a fault of Nightjar"))
    return found
