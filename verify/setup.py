"""Puts isograd_verify.pth beside the package: the line by which ISOGRAD_VERIFY=report.json is noticed."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithStartup(build_py):
    """The package, and the file that Python reads at its start."""

    def run(self) -> None:
        super().run()
        self.copy_file("isograd_verify.pth", str(Path(self.build_lib) / "isograd_verify.pth"))


setup(cmdclass={"build_py": WithStartup})
