use std::fs;

use super::*;

fn image(text: &str) -> Reference {
    format!("r.example/{text}").parse().unwrap()
}

fn files(directory: &Path, name: &str) -> usize {
    fs::read_dir(directory.join(name)).unwrap().count()
}

/// Takes a job that has to be due.
fn take(queue: &Queue) -> Taken {
    queue.lock().take().unwrap()
}

#[test]
fn jobs_survive_and_the_same_tag_is_one_job() {
    let directory = tempfile::tempdir().unwrap();
    let queue = Queue::open(directory.path()).unwrap();
    for name in ["a:1", "b:1", "a:1"] {
        queue.add(&image(name)).unwrap();
    }
    assert_eq!((queue.len(), files(directory.path(), "jobs")), (2, 2));
    assert!(Queue::open(directory.path()).is_err());
    assert_eq!(take(&queue).image, image("a:1"));
    fs::write(directory.path().join("tmp/left"), "over").unwrap();
    fs::create_dir_all(directory.path().join("tmp/lazuli-x/y")).unwrap();
    fs::write(directory.path().join("jobs/x.json"), "{").unwrap();
    drop(queue);
    let queue = Queue::open(directory.path()).unwrap();
    assert_eq!((queue.len(), files(directory.path(), "tmp")), (2, 0));
    assert_eq!(files(directory.path(), "failed"), 1);
    for _ in 0..2 {
        let taken = take(&queue);
        queue.done(&taken);
    }
    assert!(queue.lock().take().is_err());
    assert_eq!((queue.len(), files(directory.path(), "jobs")), (0, 0));
}

#[test]
fn a_job_that_is_reported_while_it_runs_runs_again() {
    let directory = tempfile::tempdir().unwrap();
    let queue = Queue::open(directory.path()).unwrap();
    queue.add(&image("a:1")).unwrap();
    let taken = take(&queue);
    queue.add(&image("a:1")).unwrap();
    assert!(queue.lock().take().is_err());
    queue.done(&taken);
    let taken = take(&queue);
    queue.add(&image("a:1")).unwrap();
    queue.failed(&taken, "x".to_owned());
    queue.done(&take(&queue));
    assert_eq!((queue.len(), files(directory.path(), "jobs")), (0, 0));
}

#[test]
fn failures_pause_a_job_and_in_the_end_it_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let queue = Queue::open(directory.path()).unwrap();
    queue.add(&image("a:1")).unwrap();
    queue.add(&image("b:1")).unwrap();
    for tries in 1..=TRIES {
        queue.lock().known.values_mut().for_each(|entry| entry.due = Instant::now());
        let taken = std::iter::repeat_with(|| take(&queue)).find(|it| it.image == image("a:1"));
        queue.failed(&taken.unwrap(), "no".to_owned());
        // The other one is not held up, and this one not due.
        queue.lock().known.values_mut().for_each(|entry| {
            assert!(entry.job.image.contains('b') || entry.due > Instant::now());
            entry.stage = Stage::Waiting;
        });
        assert_eq!(queue.len(), if tries < TRIES { 2 } else { 1 });
    }
    let failed = fs::read_dir(directory.path().join("failed")).unwrap().next().unwrap().unwrap();
    let text = fs::read_to_string(failed.path()).unwrap();
    assert!(text.contains("r.example/a:1") && text.contains("\"no\""), "{text}");
    assert_eq!(files(directory.path(), "jobs"), 1);
    // It is pushed again.
    queue.add(&image("a:1")).unwrap();
    assert_eq!((queue.len(), files(directory.path(), "failed")), (2, 0));
}

#[test]
fn a_tag_that_is_pushed_again_does_not_wait_for_the_end_of_its_pause() {
    let directory = tempfile::tempdir().unwrap();
    let queue = Queue::open(directory.path()).unwrap();
    queue.add(&image("a:1")).unwrap();
    let taken = take(&queue);
    queue.failed(&taken, "no".to_owned());
    assert!(queue.lock().take().is_err());
    queue.add(&image("a:1")).unwrap();
    take(&queue);
}

#[test]
fn pauses_grow_up_to_a_limit() {
    let seconds: Vec<u64> = (1..=TRIES).map(|tries| pause(tries).as_secs()).collect();
    assert_eq!(seconds[..4], [1, 2, 4, 8]);
    assert_eq!(seconds[9..12], [512, 600, 600]);
    assert_eq!(seconds.last(), Some(&600));
}

#[test]
fn a_full_queue_refuses_further_jobs() {
    let directory = tempfile::tempdir().unwrap();
    let queue = Queue::open(directory.path()).unwrap();
    let job = Job { image: "r.example/a:1".to_owned(), tries: 0, error: None };
    (0..LIMIT).for_each(|number| queue.lock().insert(number.to_string(), job.clone()));
    assert!(matches!(queue.add(&image("b:1")), Err(Refused::Full)));
}
