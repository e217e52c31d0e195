//! A client of containerd's CRI service, the interface of Kubernetes' kubelet: pods of one
//! container, in the network of the machine.
//!
//! ```no_run
//! use lazuli_testkit::cri::Client;
//! let client = Client::connect("/run/containerd/containerd.sock".as_ref())?;
//! client.pull("registry.example/app:1", None)?;
//! let pod = client.start("one", "registry.example/app:1", &["sleep", "1000"])?;
//! assert_eq!(client.exec(&pod.container, &["cat", "/etc/hostname"])?.status, 0);
//! client.remove(&pod.sandbox)?;
//! # Ok::<(), lazuli_testkit::cri::CriError>(())
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint},
};

use api::{
    AuthConfig, ContainerConfig, ContainerMetadata, ContainerState, ContainerStatus,
    ContainerStatusRequest, CreateContainerRequest, ExecSyncRequest, ImageFsInfoRequest, ImageSpec,
    LinuxContainerConfig, LinuxContainerSecurityContext, LinuxPodSandboxConfig,
    LinuxSandboxSecurityContext, ListContainersRequest, ListImagesRequest, ListPodSandboxRequest,
    NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata, PullImageRequest,
    RemoveImageRequest, RemovePodSandboxRequest, RunPodSandboxRequest, StartContainerRequest,
    StopPodSandboxRequest, image_service_client::ImageServiceClient,
    runtime_service_client::RuntimeServiceClient,
};
pub use api::{Container, Image, PodSandbox};

/// Kubernetes' protocol.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
mod api {
    tonic::include_proto!("runtime.v1");
}

/// The service limits a command's output to 16 MiB per stream.
const LARGEST_ANSWER: usize = 33 << 20;

/// Seconds that a command in a container may take.
const COMMAND_SECONDS: i64 = 300;

/// How long to wait before a container is asked again whether it has ended.
const INTERVAL: Duration = Duration::from_millis(10);

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// Nothing listens at the socket.
    #[error("{socket}: cannot connect to containerd")]
    Connect {
        /// The path.
        socket: PathBuf,
        /// The error.
        #[source]
        source: tonic::transport::Error,
    },
    /// containerd said no.
    #[error("{what}: {} ({:?})", status.message(), status.code())]
    Refused {
        /// The request.
        what: String,
        /// The status.
        status: Box<Status>,
    },
    /// A file of this machine.
    #[error("{what}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, CriError>;

/// A user of a registry, as a pull secret names it.
#[derive(Clone, Debug)]
pub struct Login {
    /// Its name.
    pub user: String,
    /// Its password.
    pub password: String,
}

/// A pod that was started, by the names that containerd gave.
#[derive(Clone, Debug)]
pub struct Pod {
    /// The id of the sandbox.
    pub sandbox: String,
    /// The id of its container.
    pub container: String,
}

/// The output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its exit status.
    pub status: i32,
    /// Standard output; of [`Client::run`] both outputs, as they came.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// A connection to containerd. Threads may share it.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    channel: Channel,
    /// The runtime of pods and of their images; empty for the default one.
    handler: String,
}

impl Client {
    /// Connects to the socket, which must be an absolute path.
    pub fn connect(socket: &Path) -> Result<Self> {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|source| CriError::Io { what: "cannot start threads", source })?;
        let refused = |source| CriError::Connect { socket: socket.to_owned(), source };
        let endpoint =
            Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(refused)?;
        let channel = threads.block_on(endpoint.connect()).map_err(refused)?;
        Ok(Client { runtime: threads, channel, handler: String::new() })
    }

    /// Pulls and starts for the runtime `handler` of containerd's configuration, as pods with a
    /// `RuntimeClass` are.
    pub fn with_runtime(self, handler: &str) -> Self {
        Client { handler: handler.to_owned(), ..self }
    }

    fn containers(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }

    fn image_service(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }

    fn spec(&self, image: &str) -> ImageSpec {
        let (image, runtime_handler) = (image.to_owned(), self.handler.clone());
        // CRI-O asks its policy about this name.
        ImageSpec { user_specified_image: image.clone(), image, runtime_handler }
    }

    fn wait<T>(
        &self,
        what: impl FnOnce() -> String,
        answer: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let refused = |status| CriError::Refused { what: what(), status: Box::new(status) };
        self.runtime.block_on(answer).map(Response::into_inner).map_err(refused)
    }

    /// Pulls an image; the result is the name by which containerd keeps it.
    pub fn pull(&self, image: &str, login: Option<&Login>) -> Result<String> {
        let login = login.cloned();
        let auth = login.map(|Login { user, password }| AuthConfig { username: user, password });
        // containerd heeds the runtime only if it is told of a pod.
        let pod = (!self.handler.is_empty()).then(|| sandbox_config("pull", None));
        let request = PullImageRequest { image: Some(self.spec(image)), auth, sandbox_config: pod };
        let what = || format!("pull {image}");
        Ok(self.wait(what, self.image_service().pull_image(request))?.image_ref)
    }

    /// The images on the node.
    pub fn images(&self) -> Result<Vec<Image>> {
        let what = || "list images".to_owned();
        Ok(self.wait(what, self.image_service().list_images(ListImagesRequest {}))?.images)
    }

    /// Directories of the file systems that images are on.
    pub fn image_directories(&self) -> Result<Vec<PathBuf>> {
        let what = || "file systems of images".to_owned();
        let answer = self.wait(what, self.image_service().image_fs_info(ImageFsInfoRequest {}))?;
        let known = answer.image_filesystems.into_iter().filter_map(|usage| usage.fs_id);
        Ok(known.map(|id| id.mountpoint.into()).collect())
    }

    /// Removes an image, under all of its names.
    pub fn remove_image(&self, image: &str) -> Result<()> {
        let request = RemoveImageRequest { image: Some(self.spec(image)) };
        let what = || format!("remove image {image}");
        self.wait(what, self.image_service().remove_image(request)).map(drop)
    }

    /// Starts `command` in a pod of its own; by default, the image's command. `name` must be unused
    /// by other pods.
    pub fn start(&self, name: &str, image: &str, command: &[&str]) -> Result<Pod> {
        self.start_logged(name, image, command, None)
    }

    /// Starts a command with a directory for its output, which is `log` there: lines `TIME
    /// stdout|stderr F|P TEXT`.
    pub fn start_logged(
        &self,
        name: &str,
        image: &str,
        command: &[&str],
        log: Option<&Path>,
    ) -> Result<Pod> {
        let sandbox_config = sandbox_config(name, log);
        let request = RunPodSandboxRequest {
            config: Some(sandbox_config.clone()),
            runtime_handler: self.handler.clone(),
        };
        let what = || format!("start pod {name}");
        let sandbox = self.wait(what, self.containers().run_pod_sandbox(request))?.pod_sandbox_id;
        let started = self.start_in(&sandbox, sandbox_config, image, command);
        match started {
            Ok(container) => Ok(Pod { sandbox, container }),
            Err(error) => {
                // The reason is the first error, whatever becomes of the sandbox.
                let _ = self.remove(&sandbox);
                Err(error)
            }
        }
    }

    fn start_in(
        &self,
        sandbox: &str,
        sandbox_config: PodSandboxConfig,
        image: &str,
        command: &[&str],
    ) -> Result<String> {
        let logged = !sandbox_config.log_directory.is_empty();
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: CONTAINER.to_owned(), attempt: 0 }),
            image: Some(self.spec(image)),
            command: owned(command),
            log_path: if logged { LOG.to_owned() } else { String::new() },
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: Some(namespaces()),
                }),
            }),
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let what = || format!("create a container of {image}");
        let created = self.wait(what, self.containers().create_container(request))?.container_id;
        let request = StartContainerRequest { container_id: created.clone() };
        let what = || format!("start a container of {image}");
        self.wait(what, self.containers().start_container(request))?;
        Ok(created)
    }

    /// Runs `command` in a pod of its own to its end, and removes the pod. On a busy machine,
    /// containerd may lose all output of a command that exits at once.
    pub fn run(&self, name: &str, image: &str, command: &[&str]) -> Result<Output> {
        let io = |what| move |source| CriError::Io { what, source };
        let logs =
            TempDir::new().map_err(io("cannot make a directory for the log of a container"))?;
        let pod = self.start_logged(name, image, command, Some(logs.path()))?;
        let ended = loop {
            match self.status(&pod.container) {
                Ok(status) if status.state() == ContainerState::ContainerExited => {
                    break Ok(status);
                }
                Ok(_) => thread::sleep(INTERVAL),
                Err(error) => break Err(error),
            }
        };
        // containerd closes the log when the sandbox is removed; the log is complete then.
        self.remove(&pod.sandbox)?;
        let log = fs::read(logs.path().join(LOG)).map_err(io("cannot read a container's log"))?;
        Ok(Output { status: ended?.exit_code, stdout: logged(&log), stderr: Vec::new() })
    }

    fn status(&self, container: &str) -> Result<ContainerStatus> {
        let request = ContainerStatusRequest { container_id: container.to_owned() };
        let what = || format!("status of container {container}");
        let status = self.wait(what, self.containers().container_status(request))?.status;
        Ok(status.unwrap_or_default())
    }

    /// Runs `command` in a container that runs.
    pub fn exec(&self, container: &str, command: &[&str]) -> Result<Output> {
        let request = ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: owned(command),
            timeout: COMMAND_SECONDS,
        };
        let what = || format!("{command:?} in container {container}");
        let answer = self.wait(what, self.containers().exec_sync(request))?;
        Ok(Output { status: answer.exit_code, stdout: answer.stdout, stderr: answer.stderr })
    }

    /// Kills the processes of a pod. Its container and its sandbox remain for inspection.
    pub fn stop(&self, sandbox: &str) -> Result<()> {
        let request = StopPodSandboxRequest { pod_sandbox_id: sandbox.to_owned() };
        let what = || format!("stop pod {sandbox}");
        self.wait(what, self.containers().stop_pod_sandbox(request)).map(drop)
    }

    /// Stops a pod and removes it, with its container.
    pub fn remove(&self, sandbox: &str) -> Result<()> {
        self.stop(sandbox)?;
        let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox.to_owned() };
        let what = || format!("remove pod {sandbox}");
        self.wait(what, self.containers().remove_pod_sandbox(request)).map(drop)
    }

    /// The sandboxes that are there, running or not.
    pub fn sandboxes(&self) -> Result<Vec<PodSandbox>> {
        let what = || "list pods".to_owned();
        let request = ListPodSandboxRequest {};
        Ok(self.wait(what, self.containers().list_pod_sandbox(request))?.items)
    }

    /// The containers that are there, running or not.
    pub fn list(&self) -> Result<Vec<Container>> {
        let what = || "list containers".to_owned();
        let request = ListContainersRequest {};
        Ok(self.wait(what, self.containers().list_containers(request))?.containers)
    }
}

/// The only container of a pod.
const CONTAINER: &str = "main";

/// Its log, in the pod's directory.
const LOG: &str = "log";

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Uses the machine's network: all others need plugins to set them up.
fn namespaces() -> NamespaceOption {
    let [node, container] = [NamespaceMode::Node, NamespaceMode::Container].map(i32::from);
    NamespaceOption { network: node, pid: container, ipc: container }
}

fn sandbox_config(name: &str, log: Option<&Path>) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: name.to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        log_directory: log.map(|log| log.display().to_string()).unwrap_or_default(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
            }),
        }),
    }
}

/// Extracts the output from a log of lines `TIME stdout|stderr F|P TEXT`; the line goes on after a
/// `P`.
fn logged(log: &[u8]) -> Vec<u8> {
    let mut printed = Vec::new();
    for line in log.split_inclusive(|&byte| byte == b'\n') {
        let mut words = line.splitn(4, |&byte| byte == b' ').skip(2);
        let (Some(tag), Some(text)) = (words.next(), words.next()) else { continue };
        let text =
            if tag.starts_with(b"P") { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
        printed.extend_from_slice(text);
    }
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_log_are_what_was_printed() {
        let log = b"2026-01-01T00:00:00.1Z stdout F one\n2026-01-01T00:00:00.2Z stderr P two \n\
            2026-01-01T00:00:00.3Z stderr F and a half\n2026-01-01T00:00:00.4Z stdout F \n";
        assert_eq!(logged(log), b"one\ntwo and a half\n\n");
    }

    #[test]
    fn a_dead_socket_is_an_error_that_names_it() {
        let error = Client::connect(Path::new("/nonexistent/c.sock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/c.sock"), "{error}");
    }
}
