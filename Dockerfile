# specdistill with the tested versions (constraints.txt), a C compiler (torch.compile and DeepSpeed need one) and git.
#
#   docker build --target cpu -t specdistill:cpu .
#   docker build --target cuda -t specdistill:cuda .      # run it with: docker run --gpus all …
#
# Neither image could be built where this file was written, where no Docker daemon runs; the CUDA one also needs a GPU to be tried.
FROM python:3.12-slim AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/specdistill
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt .
WORKDIR /work
ENTRYPOINT ["specdistill"]

# CUDA 13.0, as torch's wheel on PyPI; DeepSpeed needs its compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/specdistill
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt hatchling ninja setuptools torch wheel \
    && DS_BUILD_OPS=0 pip install --no-cache-dir --constraint constraints.txt --no-build-isolation deepspeed \
    && pip install --no-cache-dir --constraint constraints.txt --no-build-isolation '.[deepspeed]'
WORKDIR /work
ENTRYPOINT ["specdistill"]
