# isograd, its verifier and Hugging Face's packages; `isograd` starts. From a clone:
#
#   docker build -t isograd .
#   docker build -t isograd --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .    for GPUs
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" isograd train quickstart.yaml
#
# tests/test_image.py reads this file and runs its steps without docker. A base that has torch keeps its own.
ARG BASE=python:3.12-slim
FROM ${BASE}
WORKDIR /isograd
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY recipes recipes
COPY verify verify
RUN python -m pip install --no-cache-dir --constraint constraints.txt ./verify '.[hf,data,plot]'
RUN isograd --version && isograd recipes && isograd explain "dp2 tp2"
WORKDIR /work
ENTRYPOINT ["isograd"]
CMD ["--help"]
